"""Upkeep of the store: who owns it, what is kept, and copies of models."""
