"""Plug-ins of other distributions: rules of aggregation and controllers."""
