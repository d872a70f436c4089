"""The decider: what may be asked, what has happened, what must be done.

Pure. No I/O, no clock, no threads: `now` is an argument and chance is seeded, so a recorded list of
timed commands replays any failure. Begin with `session`, which tells the machine; `decider` runs
it, by `answers` and `steps`.
"""
