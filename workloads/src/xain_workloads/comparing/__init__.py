"""Comparison of models: with a local one, with one column permuted."""
