"""`xain-coordinator launch`: a coordinator, or a parameter server, and its workers on this machine.

plan: the workers, and the commands that start programs. programs: what a backend gives for a
program that runs. processes, containers: the two backends. lifecycle: what all launches have in
common. rounds: a coordinator and participants. sparse: a parameter server and its workers.
"""
