"""Tables: what they are, how they are read, divided and prepared for training."""
