"""Adapters of Journal."""
