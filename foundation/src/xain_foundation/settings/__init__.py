"""Settings of programs, their fields and their command lines."""
