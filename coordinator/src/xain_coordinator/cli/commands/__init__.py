"""The commands that have no folder of their own, and the options that they share."""
