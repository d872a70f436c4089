"""Linear models: by gradients, by sums, and of generalised families."""
