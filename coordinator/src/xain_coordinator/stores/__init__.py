"""Adapters of WeightsStore."""
