"""Sparse linear models and factorisation machines on libsvm data, for a parameter server."""
