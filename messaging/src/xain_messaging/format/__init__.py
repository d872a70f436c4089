"""Format of messages."""
