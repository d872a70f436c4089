"""Callers of the HTTP face of a closed coordinator. They show bearer tokens, since uvicorn hands no
certificate of a client on.
"""

import asyncio
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from xain_coordinator.access.errors import Unauthenticated, not_permitted
from xain_coordinator.http_face.errors import HttpError
from xain_coordinator.server.identity import peer_at
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Role
from xain_wire.refusal import Refusal

Scope = MutableMapping[str, Any]

# Pages without a token: how to use the face, and nothing of this coordinator.
OF_EVERYBODY = frozenset({"/v1/docs", "/v1/openapi.json"})
_READERS = frozenset({Role.OBSERVER, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})


def roles_of(method: str, path: str) -> frozenset[Role]:
    """Roles that may make a request: readers, and for what changes something operators alone."""
    is_reading = method in ("GET", "HEAD") or (method == "POST" and path.endswith("/predict"))
    return _READERS if is_reading else _OPERATORS


class HttpCallers:
    """Requests under way, and who makes them.

    bearer: the holder of a bearer token. Raises Unauthenticated.
    note_refused: told address and reason of a caller that was refused. Both from any thread.
    """

    def __init__(
        self, bearer: Callable[[str], Caller], note_refused: Callable[[str, str], object]
    ) -> None:
        self._bearer = bearer
        self._note_refused = note_refused
        self._running: dict[asyncio.Task[Any], Caller] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def admitted(self, scope: Scope) -> Iterator[None]:
        """Admit a request in this context if its bearer token permits it; a revocation of the token
        cancels its task. A refusal is noted. Raises HttpError."""
        if scope["path"] in OF_EVERYBODY:
            yield
            return
        try:
            caller = self._bearer(_token(scope))
            if caller.identity.role not in roles_of(scope["method"], scope["path"]):
                raise not_permitted(
                    f"{caller.identity} may not {scope['method']} {scope['path'][:200]}"
                )
        except Refusal as refusal:
            self._note_refused(peer_at(*(scope.get("client") or ("", 0))), str(refusal))
            raise HttpError(refusal.code, str(refusal)) from None
        task = asyncio.current_task()
        assert task is not None, "a server runs each request in a task"
        self._loop = asyncio.get_running_loop()
        # No await since bearer(): a token that is revoked meanwhile is found here.
        self._running[task] = caller
        try:
            yield
        finally:
            del self._running[task]

    def end(self, holds: Callable[[Caller], bool], refusal: Refusal) -> None:
        """Cancel the requests of the callers for whom `holds` is true. From any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the face has stopped meanwhile
                self._loop.call_soon_threadsafe(self._end, holds)

    def _end(self, holds: Callable[[Caller], bool]) -> None:
        """Cancel the requests of these callers."""
        for task, caller in self._running.items():
            if holds(caller):
                task.cancel()


def _token(scope: Scope) -> str:
    """The bearer token of a request. Raises Unauthenticated."""
    said = [value for name, value in scope["headers"] if name == b"authorization"]
    kind, _, token = said[0].decode("latin-1").partition(" ") if len(said) == 1 else ("", "", "")
    if kind.lower() != "bearer" or not token.strip():
        raise Unauthenticated(
            "a request needs one header `Authorization: Bearer TOKEN`; on the coordinator's "
            "machine `xain-coordinator tokens create --bearer` makes a token"
        )
    return token.strip()
