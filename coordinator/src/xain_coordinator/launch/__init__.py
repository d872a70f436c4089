"""`xain-coordinator launch`: a coordinator and its workers on this machine.

plan: which workers there are, and the commands that start them. programs: what a backend gives for
a program that runs. processes, containers: the two backends. course: from the start to the end.
"""
