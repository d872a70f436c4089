"""One file for each section of the configuration, or for a few that belong together."""
