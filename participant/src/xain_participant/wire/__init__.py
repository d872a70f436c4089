"""Calls to a coordinator, and transfers of models and updates."""
