"""Peers, messages, sessions and conditional events."""
