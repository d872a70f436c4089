"""Rules that plug-ins may bring: who is selected, and when a round closes."""
