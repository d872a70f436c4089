"""Rows at a path or URL: their files, a division of them into shares, and a reader of a share."""
