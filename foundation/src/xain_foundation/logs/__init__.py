"""Log lines and the files that they go to."""
