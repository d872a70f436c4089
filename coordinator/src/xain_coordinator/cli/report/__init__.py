"""`xain-coordinator report`: one page about a session."""
