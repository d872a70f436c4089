"""Adapters of MetricsStore, and the metrics that participants send."""
