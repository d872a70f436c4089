"""Mappings of thousands of entries that change one at a time.

Every change gives a new mapping and leaves the one before as it was, as a copy would, but costs the
same however large they are. All versions of a mapping share a table. An entry bears the number of
the version that put it there, and of the one that took it away; a version sees what came up to its
own number and had not gone by then. Only the latest version is changed in this way: a change of an
earlier one begins a line of its own, with a copy.

Source: Driscoll, Sarnak, Sleator & Tarjan 1989, Making Data Structures Persistent, section 3.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def including(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """A copy with this value for the key, as the last entry."""
    return _versioned(mapping).including({key: value})


def including_all(mapping: Mapping[K, V], more: Mapping[K, V]) -> Mapping[K, V]:
    """A copy with these values for their keys, as the last entries."""
    return _versioned(mapping).including(more)


def excluding(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    """A copy without the key, if it has it."""
    return _versioned(mapping).excluding(key) if key in mapping else mapping


def _versioned(mapping: Mapping[K, V]) -> "_Versioned[K, V]":
    return mapping if isinstance(mapping, _Versioned) else _Versioned(_Table(mapping.items()))


_NEVER = 1 << 62  # the version that took away what is still there

# So many entries that have gone may be in a table besides as many as are there.
_SPARE = 32


class _Entry(Generic[K, V]):
    """came, gone: numbers of versions. before: what the key had earlier, while that is known."""

    __slots__ = ("before", "came", "gone", "key", "value")

    def __init__(self, key: K, value: V, came: int, before: "_Entry[K, V] | None") -> None:
        self.key = key
        self.value = value
        self.came = came
        self.gone = _NEVER
        self.before = before


class _Table(Generic[K, V]):
    """entries: in the order in which they came. It only grows, so that one thread may read a
    version while another makes the next.

    newest: of each key. latest: the number of the latest version.
    """

    __slots__ = ("entries", "latest", "newest")

    def __init__(self, content: Iterable[tuple[K, V]]) -> None:
        self.newest: dict[K, _Entry[K, V]] = {}
        for key, value in content:
            self.newest[key] = _Entry(key, value, 0, None)
        self.entries = list(self.newest.values())
        self.latest = 0


class _Versioned(Mapping[K, V]):
    """One version of a table: by default the latest."""

    __slots__ = ("_number", "_size", "_table")

    def __init__(self, table: _Table[K, V], size: int | None = None) -> None:
        self._table = table
        self._number = table.latest
        self._size = len(table.entries) if size is None else size

    def including(self, more: Mapping[K, V]) -> "_Versioned[K, V]":
        table = self._begin()
        number, newest, size = table.latest, table.newest, self._size
        for key, value in more.items():
            before = newest.get(key)
            if before is None or before.gone != _NEVER:
                size += 1
            else:
                before.gone = number
            entry = newest[key] = _Entry(key, value, number, before)
            table.entries.append(entry)
        return _Versioned(table, size)

    def excluding(self, key: K) -> "_Versioned[K, V]":
        table = self._begin()
        table.newest[key].gone = table.latest
        return _Versioned(table, self._size - 1)

    def _begin(self) -> _Table[K, V]:
        """A table whose latest version is the next one, to be completed. Should that fail, nobody
        has it, and this one is not the latest any more."""
        table = self._table
        # A copy costs as much as the changes that have filled the table with removed entries.
        is_long = len(table.entries) > 2 * self._size + _SPARE
        if self._number != table.latest or is_long:
            table = _Table(self.pairs())
        table.latest += 1
        return table

    def _find(self, key: object) -> _Entry[K, V] | None:
        number = self._number
        entry = self._table.newest.get(key)  # type: ignore[arg-type]  # anything may be asked
        while entry is not None and entry.came > number:
            entry = entry.before
        return None if entry is None or entry.gone <= number else entry

    def pairs(self) -> Iterator[tuple[K, V]]:
        number = self._number
        for entry in self._table.entries:
            if entry.came > number:
                return  # like all that follow
            if entry.gone > number:
                yield entry.key, entry.value

    def __getitem__(self, key: K) -> V:
        entry = self._find(key)
        if entry is None:
            raise KeyError(key)
        return entry.value

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.pairs())

    # Mapping would derive these from the three above, several times as slow.

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None

    def get(self, key: K, default: Any = None, /) -> Any:
        entry = self._find(key)
        return default if entry is None else entry.value

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def __repr__(self) -> str:
        return repr(dict(self.pairs()))


class _Items(ItemsView[K, V]):
    _mapping: _Versioned[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._mapping.pairs()


class _Values(ValuesView[V]):
    _mapping: _Versioned[Any, V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.pairs())
