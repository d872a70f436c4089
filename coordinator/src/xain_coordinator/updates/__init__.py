"""The way of an update from the wire until it counts."""
