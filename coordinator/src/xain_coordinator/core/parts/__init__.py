"""Parts of a session."""
