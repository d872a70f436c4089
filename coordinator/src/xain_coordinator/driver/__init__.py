"""Driver: it owns the session, commits events to the journal, then replies and runs effects."""
