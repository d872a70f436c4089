"""A Flower app that measures its rounds."""
