"""Groups of processes: who is in them, at which address, and barriers that members wait at."""
