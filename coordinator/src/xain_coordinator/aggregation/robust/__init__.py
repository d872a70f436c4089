"""Rules that few wrong updates do not move far."""
