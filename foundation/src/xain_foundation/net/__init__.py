"""Connections, channels and calls."""
