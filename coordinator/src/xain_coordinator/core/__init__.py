"""The decider: commands and questions in; events, replies and effects out.

Pure. No I/O, no clock, no threads: `now` is an argument and chance is seeded, so a recorded list of
timed commands replays any failure. Begin with `session`, which tells the machine; `decider` runs
it, by `answers` and `steps`.
"""
