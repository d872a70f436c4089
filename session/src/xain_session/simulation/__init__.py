"""Simulated participants, on this machine or on a Ray cluster."""
