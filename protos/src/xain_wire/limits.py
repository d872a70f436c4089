"""Limits of what travels between participants and their coordinator."""

# int32 on the wire: rounds, epochs, participants and sample counts.
MAX_INT32 = 2**31 - 1

# Weights of at most so many bytes travel inside the call that starts a round or hands an update in:
# they cost less than the stream that would carry them.
MAX_INLINE_BYTES = 64 << 10

# The slowest line that is served moves LEAST_BYTES in STALLED_S. What counts is bytes, never whole
# messages, where bytes can be seen.
LEAST_BYTES = 64 << 10
STALLED_S = 30.0
SLOWEST_LINE_BYTES_PER_S = LEAST_BYTES / STALLED_S

# Metrics that a participant sends with an update have at most these.
MAX_METRICS_BYTES = 64 << 10
MAX_POINTS = 1000
