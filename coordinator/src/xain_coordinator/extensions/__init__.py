"""Plug-ins of other distributions: aggregation rules, controllers and pacing rules."""
