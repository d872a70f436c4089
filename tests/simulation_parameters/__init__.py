"""The parameter server in one thread on a virtual clock, with faults drawn from a seed.

The server nodes and the scheduler's decider are the real ones; time, network, disk, leases and the
death of processes are simulated, and workers are models of the client. One seed is one history, to
the last step.

    clock.py       virtual time: what happens next
    network.py     connections: ordered and reliable until they break
    scheduler.py   the decider with its journal, leases and calls
    servers.py     server processes around ServerNode, with a disk each
    workers.py     workers that pull, push and tick
    readers.py     workers that divide rows among them, too
    scenario.py    what is simulated: group, consistency, faults
    oracle.py      what must always be true
    world.py       one run from beginning to end
    mutations.py   defects that it must find
"""
