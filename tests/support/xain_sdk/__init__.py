"""XAIN's own SDK 0.6.0, in an environment of its own: its modules of messages cannot share a
process with ours, nor its protobuf an environment."""
