"""Mappings that change one entry at a time: as copies would be, without the copying."""

import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_coordinator.core import versioned
from xain_coordinator.core.versioned import excluding, including, including_all

KEYS = "abcdef"
NUM = 2000


@pytest.fixture
def num_copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries each new table was begun with."""
    copied: list[int] = []
    begin = versioned._Table.__init__

    def counting(self, content):
        begin(self, content)
        copied.append(len(self.entries))

    monkeypatch.setattr(versioned._Table, "__init__", counting)
    return copied


def changed(
    mapping: Mapping[str, int], plain: dict[str, int], change: str, key: str, value: int
) -> tuple[Mapping[str, int], dict[str, int]]:
    """One change of a mapping, and of a copy of the dict that it is to be like."""
    plain = dict(plain)
    match change:
        case "including":
            plain.pop(key, None)
            plain[key] = value
            return including(mapping, key, value), plain
        case "excluding":
            plain.pop(key, None)
            return excluding(mapping, key), plain
        case _:
            more = {name: value for name in KEYS if name >= key}
            plain = {name: old for name, old in plain.items() if name not in more} | more
            return including_all(mapping, more), plain


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["including", "including", "excluding", "all"]),
            st.sampled_from(KEYS),
            st.integers(),
            st.integers(0, 3),
        ),
        max_size=120,
    )
)
def test_every_version_is_like_a_copy(steps) -> None:
    """In content and order, whatever becomes of those that come from it, and from whichever of the
    versions so far the next one comes."""
    versions: list[tuple[Mapping[str, int], dict[str, int]]] = [({}, {})]
    for change, key, value, back in steps:
        mapping, plain = versions[-1 - min(back, len(versions) - 1)]
        versions.append(changed(mapping, plain, change, key, value))
    for mapping, plain in versions:
        assert list(mapping) == list(mapping.keys()) == list(plain)
        assert list(mapping.items()) == list(plain.items())
        assert list(mapping.values()) == list(plain.values())
        assert len(mapping) == len(plain)
        assert mapping == plain
        assert repr(mapping) == repr(plain)
        assert [mapping.get(key) for key in KEYS] == [plain.get(key) for key in KEYS]
        assert [key in mapping for key in KEYS] == [key in plain for key in KEYS]
        for key, value in plain.items():
            assert mapping[key] == value
            assert (key, value) in mapping.items()
        for key in set(KEYS) - set(plain):
            assert mapping.get(key, "none") == "none"
            with pytest.raises(KeyError, match=key):
                mapping[key]


def test_what_grows_is_not_copied(num_copied: list[int]) -> None:
    mapping: Mapping[str, int] = {}
    for number in range(NUM):
        mapping = including(mapping, f"{number}", number)
    assert len(mapping) == NUM
    assert num_copied == [0]


def test_what_changes_is_copied_once_in_as_many_changes(num_copied: list[int]) -> None:
    """So a change costs the same however large it is, and what has gone fills no memory."""
    mapping: Mapping[str, int] = dict.fromkeys(map(str, range(NUM)), 0)
    for number in range(10 * NUM):
        mapping = including(mapping, f"{number % NUM}", number)
    assert set(num_copied) == {NUM}
    assert 8 <= len(num_copied) <= 11


def test_what_shrinks_is_copied_less_and_less(num_copied: list[int]) -> None:
    mapping: Mapping[str, int] = dict.fromkeys(map(str, range(NUM)), 0)
    for number in range(NUM):
        mapping = excluding(mapping, f"{number}")
    assert not mapping
    assert sum(num_copied) <= 2 * NUM
    assert excluding(mapping, "0") is mapping


def test_a_change_that_fails_changes_nothing() -> None:
    """Nobody has what it led to, and the next change does not come upon half of it."""

    class Broken(dict[str, int]):
        def items(self):
            yield "b", 2
            raise RuntimeError

    before = including({}, "a", 1)
    with pytest.raises(RuntimeError):
        including_all(before, Broken())
    assert before == {"a": 1}
    assert including(before, "c", 3) == {"a": 1, "c": 3}


@pytest.fixture
def _turns() -> Iterator[None]:
    """Threads take turns at every opportunity, so that what may come between two steps does."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("_turns")
def test_a_version_may_be_read_while_others_are_made() -> None:
    """A thread that writes a snapshot has one, while the session goes on: with the same table,
    until that has grown too long."""
    keys = [str(number) for number in range(60)]
    plain = dict.fromkeys(keys, 0)
    mapping = including_all({}, plain)
    shared: tuple[Mapping[str, int], dict[str, int]] = mapping, dict(plain)
    begun, over = threading.Event(), threading.Event()

    def read() -> None:
        try:
            while not over.is_set():
                version, content = shared
                assert [version.get(key) for key in keys] == [content.get(key) for key in keys]
                assert list(version.items()) == list(content.items())
                assert len(version) == len(content)
                begun.set()
        finally:
            begun.set()

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        begun.wait()
        try:
            for number in range(20 * NUM):
                changes = ("including", "including", "excluding", "including")
                key = keys[number * 7 % len(keys)]
                mapping, plain = changed(mapping, plain, changes[number % 4], key, number)
                if number % 8 == 0:
                    shared = mapping, plain
        finally:
            over.set()
        reading.result()
