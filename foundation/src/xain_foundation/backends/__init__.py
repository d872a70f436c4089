"""Backends: where workers run. The port, and the backend of a Ray cluster."""
