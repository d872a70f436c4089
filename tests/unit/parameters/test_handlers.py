"""Handlers of requests, and the thread that calls them."""

import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from support.logs import capture_logs
from xain_parameters.handlers import (
    MAX_ERROR_CHARACTERS,
    MAX_KEPT,
    MAX_WAITING,
    HandlerThread,
    Reply,
    Request,
    load_handler,
)

LONG_S = 120.0  # for what takes microseconds, on a machine that has other things to do


class Held:
    """A handler that answers when it is told to, and the replies that came of it."""

    def __init__(self) -> None:
        self.seen: SimpleQueue[int] = SimpleQueue()
        self.go = threading.Semaphore(0)
        self.replies: SimpleQueue[tuple[str, Reply]] = SimpleQueue()
        self.thread = HandlerThread("s0", self.handle)

    def handle(self, request: Request) -> str:
        self.seen.put(request.head)
        assert self.go.acquire(timeout=LONG_S)
        return str(request.head)

    def put(self, number: int, told: str = "") -> None:
        request = Request(number, "", "w0")
        self.thread.put(("w0", 1, number), request, lambda reply: self.replies.put((told, reply)))


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go.release(1000)
    made.thread.close()


def test_requests_beyond_the_bound_are_refused_at_once_and_the_others_done(held):
    for number in range(MAX_WAITING):
        held.put(number)
    held.put(MAX_WAITING)
    error = f"{MAX_WAITING} requests wait for its handler already"
    assert held.replies.get(timeout=LONG_S) == ("", Reply(error=error))
    held.go.release(MAX_WAITING)
    answers = [held.replies.get(timeout=LONG_S)[1].body for _ in range(MAX_WAITING)]
    assert answers == [str(number) for number in range(MAX_WAITING)]


def test_request_that_comes_again_is_done_once_and_told_to_the_last_that_put_it(held):
    """While it waits, while the handler is at it, and when it is over."""
    held.put(1, "first")
    held.put(2, "first")
    assert held.seen.get(timeout=LONG_S) == 1
    held.put(1, "second")
    held.put(2, "second")
    held.go.release(2)
    assert held.replies.get(timeout=LONG_S) == ("second", Reply("1"))
    assert held.replies.get(timeout=LONG_S) == ("second", Reply("2"))
    held.put(1, "third")
    assert held.replies.get(timeout=LONG_S) == ("third", Reply("1"))
    assert held.seen.get(timeout=LONG_S) == 2
    assert held.seen.empty()
    assert held.replies.empty()


def test_replies_that_are_kept_are_bounded(held):
    """The latest request that comes again is answered from memory, and the first is done again."""
    held.go.release(1000)
    for number in (*range(MAX_KEPT + 1), MAX_KEPT, 0):
        held.put(number)
        held.replies.get(timeout=LONG_S)
    seen = [held.seen.get(timeout=LONG_S) for _ in range(MAX_KEPT + 2)]
    assert seen == [*range(MAX_KEPT + 1), 0]


def test_closed_handler_begins_no_request(held):
    held.put(1)
    held.put(2)
    assert held.seen.get(timeout=LONG_S) == 1
    held.thread.close()
    held.put(3)
    assert held.replies.get(timeout=LONG_S) == ("", Reply(error="it is being stopped"))
    held.go.release(2)
    assert held.replies.get(timeout=LONG_S) == ("", Reply("1"))
    assert held.seen.empty()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (Unprintable(), "Unprintable"),
        (ValueError("\ud800"), "ValueError: ?"),
        (ValueError(5000 * "x"), f"ValueError: {5000 * 'x'}"[:MAX_ERROR_CHARACTERS]),
    ],
)
def test_whatever_a_handler_raises_is_told_and_the_next_request_done(raised, text):
    replies = SimpleQueue()

    def handle(request):
        if request.head:
            raise raised
        return "done"

    thread = HandlerThread("s0", handle)
    with capture_logs() as lines:
        for head in (1, 0):
            thread.put(("w0", 1, head), Request(head, "", "w0"), replies.put)
        assert replies.get(timeout=LONG_S) == Reply(error=text)
        assert replies.get(timeout=LONG_S) == Reply("done")
    thread.close()
    assert [line["event"] for line in lines] == ["handler_failed"]


def test_answer_that_is_no_text_is_an_error():
    replies = SimpleQueue()
    thread = HandlerThread("s0", lambda request: 3)
    thread.put(("w0", 1, 1), Request(1, "", "w0"), replies.put)
    text = "TypeError: the handler returned int, and no text"
    assert replies.get(timeout=LONG_S) == Reply(error=text)
    thread.close()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("handlers", "'handlers' is no function; write package.module:function"),
        (":answer", "':answer' is no function; write package.module:function"),
        ("no_module:answer", "module 'no_module' cannot be imported: ModuleNotFoundError"),
        ("handlers_that_end:answer", "cannot be imported: SystemExit: 3"),
        ("handlers_that_raise:answer", "cannot be imported: ValueError: two lines"),
        ("handlers_of_a_test:nothing", "module 'handlers_of_a_test' has no function 'nothing'"),
        ("handlers_of_a_test:number", "'handlers_of_a_test:number' is int; a handler is a plain"),
        ("handlers_of_a_test:later", "'handlers_of_a_test:later' is a coroutine function; a"),
    ],
)
def test_wrong_import_path_is_told_in_one_line(tmp_path, monkeypatch, path, text):
    source = "number = 3\ndef answer(request): return request.body\nasync def later(request): ..."
    (tmp_path / "handlers_of_a_test.py").write_text(source)
    (tmp_path / "handlers_that_end.py").write_text("raise SystemExit(3)")
    (tmp_path / "handlers_that_raise.py").write_text("raise ValueError('two\\nlines')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        load_handler(path)
    assert text in str(refused.value)
    assert load_handler("handlers_of_a_test:answer")(Request(1, "x", "w0")) == "x"
    sys.modules.pop("handlers_of_a_test")
