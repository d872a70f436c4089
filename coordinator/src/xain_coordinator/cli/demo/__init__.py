"""The demo: a launch of a coordinator and participants that train one model on split data."""
