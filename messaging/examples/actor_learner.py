"""An actor and a learner, where the actor dies and comes back.

    python messaging/examples/actor_learner.py [--rounds 6] [--driver grpc]

The learner asks its two actors for experience, round by round. One of them is killed in the middle.
The learner goes on with the answers of those who are there; what it asks of the dead one is kept,
and answered when that one is back under its name: no request is lost.
"""

import argparse
import multiprocessing as mp
import time
from multiprocessing.process import BaseProcess

import numpy as np

from xain_foundation.logs.logs import configure
from xain_messaging import MembershipServer, Proxy, SessionType

GROUP = "reinforcement"
ACTORS = ("actor-0", "actor-1")
PATIENCE_S = 60.0  # for what takes a second


def act(discovery: str, driver: str, name: str) -> None:
    """An actor: answers each request with experience, until it is told to stop."""
    configure("warning", console=True, third_party=False)
    rng = np.random.default_rng()
    with Proxy(
        GROUP, "actor", {"learner": 1}, name=name, discovery=discovery, driver=driver
    ) as proxy:
        # It ends too when the learner has died and asks no more.
        while (message := proxy.receive_once(PATIENCE_S)) is not None:
            if message.tag == "stop":
                return
            number, policy = message.body["round"], message.body["policy"]
            proxy.reply(
                message, "experience", {"round": number, "rewards": rng.normal(policy, size=8)}
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--driver", choices=["grpc", "zmq"], default="grpc")
    arguments = parser.parse_args()
    configure("warning", console=True, third_party=False)
    with MembershipServer() as membership:

        def start(name: str) -> BaseProcess:
            process = mp.get_context("spawn").Process(
                target=act, args=(membership.target, arguments.driver, name), daemon=True
            )
            process.start()
            return process

        processes = {name: start(name) for name in ACTORS}
        asked: set[tuple[str, int]] = set()
        answered: set[tuple[str, int]] = set()
        policy = 0.0
        with Proxy(
            GROUP,
            "learner",
            {"actor": len(ACTORS)},
            discovery=membership.target,
            driver=arguments.driver,
        ) as proxy:

            def here() -> list[str]:
                return proxy.peers.get("actor", [])

            for number in range(arguments.rounds):
                if number == 2:
                    processes["actor-1"].kill()
                    print("actor-1 has been killed")
                    while "actor-1" in here():
                        proxy.receive_once(0.1)  # who is here changes while one waits
                if number == 4:
                    processes["actor-1"] = start("actor-1")
                    print("actor-1 is started again")
                request = {"round": number, "policy": policy}
                asked |= {(name, number) for name in ACTORS}
                awaited = here()
                sessions = proxy.iscatter(
                    "act", SessionType.TASK, [(name, request) for name in ACTORS]
                )
                replies = proxy.receive_by_id(
                    [
                        session
                        for name, session in zip(ACTORS, sessions, strict=True)
                        if name in awaited
                    ],
                    PATIENCE_S,
                ).complete()
                answered |= {(reply.source, reply.body["round"]) for reply in replies}
                policy += 0.1 * np.mean([reply.body["rewards"].mean() for reply in replies])
                away = ", ".join(name for name in ACTORS if name not in awaited)
                missing = f", missing: {away}" if away else ""
                print(f"round {number}: {len(replies)} answers{missing}")
            # The answers of one that was away come when it is back, by themselves.
            give_up_at = time.monotonic() + PATIENCE_S
            while asked != answered and time.monotonic() < give_up_at:
                late = proxy.receive_once(timeout_s=1.0)
                if late is not None:
                    answered.add((late.source, late.body["round"]))
                    print(f"late: round {late.body['round']} of {late.source}")
            print(f"asked {len(asked)}, answered {len(answered)}")
            proxy.ibroadcast("actor", "stop", SessionType.NOTIFICATION)
        for process in processes.values():
            process.join(PATIENCE_S)


if __name__ == "__main__":
    main()
