"""Plug-ins of other distributions: rules, controllers and stores."""
