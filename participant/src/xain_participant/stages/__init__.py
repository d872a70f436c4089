"""Stages of a model, trained by several participants together."""
