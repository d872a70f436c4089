"""Views of a session for people: its history, accounts and warnings."""
