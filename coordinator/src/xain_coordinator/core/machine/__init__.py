"""The state machine of a session."""
