"""Certificates, identities and TLS."""
