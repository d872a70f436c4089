"""Peers that find each other at a real coordinator, which is killed."""

import asyncio

from support.messaging import PATIENCE_S, taken, until
from support.process import CoordinatorProcess
from xain_messaging.format.messages import SessionMessage
from xain_messaging.proxy import Proxy


def joined(port: int, role: str, expected: dict[str, int] | None = None) -> Proxy:
    return Proxy(
        "training",
        role,
        expected,
        name=role,
        discovery=f"127.0.0.1:{port}",
        timeout_s=PATIENCE_S,
    )


async def test_peers_go_on_while_their_coordinator_is_away(tmp_path):
    """kill -9: those who know each other go on talking. Started again, it knows them as who they
    were, and who comes then is told of them."""
    coordinator = CoordinatorProcess(tmp_path, {})
    await coordinator.start()
    proxies = []
    try:
        proxies.append(await asyncio.to_thread(joined, coordinator.port, "master"))
        proxies.append(await asyncio.to_thread(joined, coordinator.port, "worker", {"master": 1}))
        master, worker = proxies
        before = [proxy.endpoint.member for proxy in proxies]

        def ask(body: int) -> object:
            session = master.isend(SessionMessage("ask", "master", "worker", body))
            asked = taken(worker)
            worker.reply(asked, body=asked.body + 1)
            (answer,) = master.receive_by_id(session)
            return answer.body

        await asyncio.to_thread(until, lambda: "worker" in master.peers, "the worker")
        assert await asyncio.to_thread(ask, 1) == 2
        await coordinator.kill()
        assert await asyncio.to_thread(ask, 2) == 3
        await coordinator.start()
        proxies.append(
            await asyncio.to_thread(joined, coordinator.port, "late", {"master": 1, "worker": 1})
        )
        assert await asyncio.to_thread(ask, 3) == 4
        assert [proxy.endpoint.member for proxy in proxies[:2]] == before
    finally:
        for proxy in proxies:
            await asyncio.to_thread(proxy.close, 0.0)
        await coordinator.end()
