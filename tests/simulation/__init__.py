"""The whole system in one thread on a virtual clock, with faults drawn from a seed.

What runs is the real thing, from the coordinator's core to the participants' agents; what is
simulated is what they stand on: time, event loop, threads, network, disk, store and the death of
processes. One seed is one history, to the last step, so whatever goes wrong can be seen again.

    hub.py          virtual time: what happens next, and to whom
    loop.py         asyncio's event loop on it
    threads.py      threads on it
    network.py      gRPC between them: connections, and what can happen on the way
    channel.py      a participant's end of it
    server.py       the coordinator's end of it
    direct.py       the way past the coordinator, on both sides
    disk.py         the journal and the store, and what a crash leaves of them
    coordinator.py  a coordinator's process, put together as assembly/coordinator.py does it
    fleet.py        the participants' processes
    scenario.py     what is simulated: the session, its fleet and its faults
    oracle.py       what must always be true
    aggregation.py  what rules and optimisers come to
    world.py        one run from beginning to end
    mutations.py    defects that it must find
"""
