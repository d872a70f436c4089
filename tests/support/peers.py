"""Peers that do what a test tells them: in its own process, or in one of theirs, to be killed."""

import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from support.messaging import PATIENCE_S, driver_maker, until
from xain_membership.ports import Discovery, Member
from xain_messaging.format.messages import SessionMessage
from xain_messaging.proxy import Proxy


class Peer(Protocol):
    """do: calls a function of this module with its proxy, and gives what that returns or raises."""

    def do(self, what: Callable[..., Any], *arguments: Any) -> Any: ...

    def end(self) -> None:
        """End the peer in its own way; may be called again."""
        ...


class LocalPeer:
    """See Peer. It ends by leaving."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def do(self, what: Callable[..., Any], *arguments: Any) -> Any:
        return what(self._proxy, *arguments)

    def end(self) -> None:
        self._proxy.close(0.0)


class PeerProcess:
    """See Peer. It ends by SIGKILL. Its construction is over when it has joined.

    Discovery, options and what it does and gives go through a pickle, from test to test process.
    """

    def __init__(
        self,
        group_name: str,
        role: str,
        expected: dict[str, int] | None,
        discovery: Discovery,
        driver: str,
        options: dict[str, Any],
    ) -> None:
        context = mp.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(its_end, group_name, role, expected, discovery, driver, options),
            daemon=True,
        )
        self._process.start()
        its_end.close()
        try:
            self.given()
        except BaseException:  # whatever it is: nothing of it stays
            self.end()
            raise

    def begin(self, what: Callable[..., Any], *arguments: Any) -> None:
        """Have it do that; given() waits for it."""
        self._pipe.send((what, arguments))

    def given(self) -> Any:
        """The result of the process's call, which raises what the call has raised."""
        assert self._pipe.poll(PATIENCE_S), "the process does not answer"
        is_error, given = self._pipe.recv()
        if is_error:
            raise given
        return given

    def do(self, what: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(what, *arguments)
        return self.given()

    def suspend(self) -> None:
        """Stop the process without ending it: it sends nothing, not even heartbeats."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)
        self._pipe.close()


def _serve(
    pipe: Connection,
    group_name: str,
    role: str,
    expected: Any,
    discovery: Discovery,
    driver: str,
    options: dict[str, Any],
) -> None:
    """The program of a peer."""
    try:
        proxy = Proxy(
            group_name,
            role,
            expected,
            discovery=discovery,
            driver=driver_maker(driver)(),
            **options,
        )
    except Exception as error:  # whatever it is, it is the test's
        pipe.send((True, error))
        return
    with proxy:
        given: tuple[bool, Any] = (False, None)
        while True:
            try:
                pipe.send(given)
                what, arguments = pipe.recv()
            except (EOFError, OSError):  # the test is over
                return
            try:
                given = (False, what(proxy, *arguments))
            except Exception as error:  # whatever it is, it is the test's
                given = (True, error)


# --- what they do ---------------------------------------------------------------------------------


def member(proxy: Proxy) -> Member:
    return proxy.endpoint.member


def answer(proxy: Proxy, number: int, timeout_s: float = PATIENCE_S) -> list[Any]:
    """Take so many messages, and answer requests with twice their body. Returns the bodies."""
    bodies = []
    for _, message in zip(range(number), proxy.receive(timeout_s), strict=False):
        bodies.append(message.body)
        if isinstance(message, SessionMessage):
            proxy.reply(message, body=message.body * 2)
    return bodies


def collective(
    proxy: Proxy, group: str, members: list[str] | None, operation: str, *arguments: Any
) -> Any:
    """One operation of a group, once its members are known here: the last ones are known to
    each of the others at another time."""

    def knows_all() -> bool:
        known = {name for names in proxy.peers.values() for name in names}
        return known | {proxy.name} >= set(members or ())

    until(knows_all, "all members to be known")
    return getattr(proxy.group(group, members), operation)(*arguments)


# --- collective operations, as numpy does them ----------------------------------------------------

OPERATORS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
OPERATIONS = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def arrays_of(rng: np.random.Generator, number: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Small whole numbers: their sums are exact in every order."""
    return [rng.integers(0, 3, shape).astype(dtype) for _ in range(number)]


def given_to(
    operation: str, arrays: list[Any], rank: int, op: str = "sum", root: int = 0
) -> tuple[Any, ...]:
    match operation:
        case "all_to_all":
            return ([arrays[rank] + to for to in range(len(arrays))],)
        case "barrier":
            return ()
        case "broadcast":
            return (arrays[rank] if rank == root else None, root)
        case "scatter":
            return (
                [arrays[root] + to for to in range(len(arrays))] if rank == root else None,
                root,
            )
        case "gather":
            return (arrays[rank], root)
        case "reduce":
            return (arrays[rank], op, root)
        case "all_gather":
            return (arrays[rank],)
    return (arrays[rank], op)


def results_of(operation: str, arrays: list[Any], op: str = "sum", root: int = 0) -> list[Any]:
    """The result of each member, by rank, in the machine's byte order."""
    number = len(arrays)
    arrays = [array.astype(array.dtype.newbyteorder("=")) for array in arrays]
    if operation in ("gather", "all_gather"):
        whole = np.stack(arrays)
    else:
        # numpy itself widens what it reduces; the dtype is to stay.
        whole = arrays[0]
        for array in arrays[1:]:
            whole = OPERATORS[op](whole, array)
    match operation:
        case "all_to_all":
            return [[array + rank for array in arrays] for rank in range(number)]
        case "barrier":
            return [None] * number
        case "broadcast":
            return [arrays[root]] * number
        case "scatter":
            return [arrays[root] + rank for rank in range(number)]
        case "reduce" | "gather":
            return [whole if rank == root else None for rank in range(number)]
        case "reduce_scatter":
            return np.array_split(whole, number)
    return [whole] * number


def same(found: Any, expected: Any) -> None:
    """Compare results array by array; None is None."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif expected is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, expected)
        assert found.shape == np.shape(expected)
        assert found.dtype.str == expected.dtype.str
