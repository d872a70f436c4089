"""State that a participant keeps on its disk."""
