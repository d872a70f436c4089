"""The command line of a participant."""
