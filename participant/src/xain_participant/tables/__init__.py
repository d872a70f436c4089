"""Participants that train on tables."""
