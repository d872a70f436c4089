"""The workers and the data of a job. Pure: no I/O, no clock, no threads."""
