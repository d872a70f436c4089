"""Measures of a model: sums over rows, and the figures that follow from them."""
