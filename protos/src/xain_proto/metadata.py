"""Metadata keys of the calls, beside those of gRPC."""

# Name of a participant, stable across reconnects.
PARTICIPANT_ID_KEY = "xain-participant-id"

# Tells two processes with one participant id apart: random, or kept by a state directory.
INSTANCE_ID_KEY = "xain-instance-id"
