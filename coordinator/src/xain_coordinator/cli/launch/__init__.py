"""`xain-coordinator launch`: a coordinator, or a parameter server, and its workers on this machine.

plan: the workers, and the commands that start programs. processes, containers: the two backends,
which run programs. supervisor: starts programs, watches them, starts dead ones again and stops all.
rounds: a coordinator and participants. sparse: a parameter server and its workers.
"""
