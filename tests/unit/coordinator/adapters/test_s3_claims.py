"""No two contents under one name, in whatever order the requests of several writers arrive."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from xain_coordinator.ports import KeyClaimed, KeyExists, KeyNotFound, StoreError
from xain_coordinator.stores.s3.s3 import S3Store
from xain_coordinator.stores.s3.s3_bucket import Bucket, Piece

NUM_STEPS = 5  # requests of a writer that publishes, in the simplest case


class Server:
    """The objects of a bucket, and all that was ever written as "1/global". If-None-Match is
    ignored, as by some real servers."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.published: set[bytes] = set()


class SlowBucket:
    """A writer's way to the server: each request waits until `turn` lets it pass."""

    name = "bucket"
    host = "nowhere"

    def __init__(self, server: Server, pause: Callable[[], None]) -> None:
        self._server = server
        self._pause = pause

    def put(self, key: str, name: str, body: Any, *, only_if_free: bool = False) -> None:
        data = body if isinstance(body, bytes) else body.read()
        if not isinstance(body, bytes):
            body.seek(0)
            data = body.read()
        self._pause()
        self._server.objects[name] = data
        if name == key:
            self._server.published.add(data)

    def get(self, key: str, name: str, offset: int, length: int, etag: str = "") -> Piece:
        self._pause()
        if name not in self._server.objects:
            raise KeyNotFound(key)
        return Piece(b"", 1, "x")

    def names(self, prefix: str) -> Iterator[str]:
        self._pause()
        return iter([name for name in self._server.objects if name.startswith(prefix)])

    def delete(self, key: str, name: str) -> None:
        self._pause()
        self._server.objects.pop(name, None)


class Died(Exception):
    """kill -9, as far as a thread can have it."""


class Writer:
    """Publishes `content`, one request at a time and only when it is let."""

    def __init__(self, server: Server, content: bytes, folder: Path) -> None:
        self._go = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._dies = False
        self._ended = False
        bucket = cast(Bucket, SlowBucket(server, self._pause))
        self._upload = S3Store(bucket, "", folder).upload("1/global")
        self._upload.write(content)
        self.result: Future[None] = Future()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._arrived.acquire()

    def _run(self) -> None:
        try:
            self._upload.commit(overwrite=False)
        except (StoreError, Died) as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(None)
        self._ended = True
        self._arrived.release()

    def _pause(self) -> None:
        self._arrived.release()
        self._go.acquire()
        if self._dies:
            raise Died

    def step(self) -> None:
        """The next request, if there is any."""
        if not self._ended:
            self._go.release()
            self._arrived.acquire()

    def finish(self) -> BaseException | None:
        """All the others. Returns what its commit raised."""
        while not self._ended:
            self.step()
        self._thread.join()
        return self.result.exception()

    def die(self) -> None:
        self._dies = True
        self.finish()


def orders(*lengths: int) -> Iterator[Sequence[int]]:
    """Every order in which writers can take that many steps each."""
    if not any(lengths):
        yield ()
    for number, length in enumerate(lengths):
        if length:
            rest = [*lengths[:number], length - 1, *lengths[number + 1 :]]
            yield from ((number, *order) for order in orders(*rest))


@pytest.mark.parametrize("contents", [(b"a", b"b"), (b"a", b"a")])
def test_two_writers(contents, tmp_path):
    """In every order at most one content is published, and a writer that is told that it has
    published has. Of two that would publish the same, one does at least. No claim stays."""
    for order in orders(NUM_STEPS, NUM_STEPS):
        server = Server()
        writers = [Writer(server, content, tmp_path) for content in contents]
        for number in order:
            writers[number].step()
        errors = [writer.finish() for writer in writers]
        assert len(server.published) <= 1, order
        for content, error in zip(contents, errors, strict=True):
            assert isinstance(error, KeyExists | KeyClaimed | None), order
            assert error is not None or server.published == {content}, order
        if contents[0] == contents[1]:
            assert server.published, order
        assert set(server.objects) <= {"1/global"}, order


def test_the_claim_of_another_writer_of_the_same(tmp_path):
    """One is about to publish. Whatever a second one of the same content does then, above all
    giving up, and a third one of other content: it rests on its own claim."""
    for order in orders(NUM_STEPS, NUM_STEPS):
        server = Server()
        slow, same, other = (Writer(server, content, tmp_path) for content in (b"a", b"a", b"b"))
        for _ in range(NUM_STEPS - 2):  # all but publishing and dropping its claim
            slow.step()
        for number in order:
            (same, other)[number].step()
        errors = [writer.finish() for writer in (slow, same, other)]
        assert server.published == {b"a"}, order
        assert errors[0] is None, order


def test_a_writer_that_dies(tmp_path):
    """Wherever it does, its successor brings the same content and publishes it, unless somebody
    else has; and nobody publishes other content over it."""
    for num_steps in range(NUM_STEPS):
        for order in orders(num_steps, NUM_STEPS):
            server = Server()
            first, other = Writer(server, b"a", tmp_path), Writer(server, b"b", tmp_path)
            for number in order:
                (first, other)[number].step()
            first.die()
            other.finish()
            successor = Writer(server, b"a", tmp_path).finish()
            if server.published == {b"b"}:
                assert isinstance(successor, KeyExists), order
            else:
                assert isinstance(successor, KeyExists | None), order
                assert server.published == {b"a"}, order
