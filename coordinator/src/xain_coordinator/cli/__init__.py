"""Command line: the commands, their views, the demo and the launcher."""
