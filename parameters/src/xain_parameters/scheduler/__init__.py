"""The scheduler of the parameter server: who has which key range, tables, clocks, checkpoints.

state.py, commands.py, placement.py and decider.py decide and do no I/O; journal.py keeps the events
in a file, service.py answers over gRPC, client.py asks it for servers and workers.
"""
