"""Aggregation by tiles: the rules, and the engine that feeds them."""
