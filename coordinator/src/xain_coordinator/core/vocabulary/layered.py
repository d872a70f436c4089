"""Mappings of thousands of entries that change one at a time.

Every change gives a new mapping and leaves the one before as it was. A small mapping is copied. Of
a large one only the latest changes are: they lie in a dict of their own, in front of another dict
that all mappings since the last whole copy share. None of these dicts is ever changed.
"""

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# With so many changes, or so few entries, a mapping is copied as a whole.
MAX_CHANGES = 20

_GONE: Any = object()  # the value of a key that was removed


def including(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """A copy with this value for the key, as the last entry."""
    return including_all(mapping, {key: value})


def including_all(mapping: Mapping[K, V], more: Mapping[K, V]) -> Mapping[K, V]:
    """A copy of a mapping with more entries, which come last."""
    base, before = mapping.layers if isinstance(mapping, _Layered) else (mapping, {})
    changes = dict(before)
    for key, value in more.items():
        changes.pop(key, None)
        changes[key] = value
    if len(base) > MAX_CHANGES > len(changes):
        return _Layered(base, changes)
    whole = dict(base)
    for key, value in changes.items():
        whole.pop(key, None)
        if value is not _GONE:
            whole[key] = value
    return whole


def excluding(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    """A copy without the key, if it has it."""
    return including(mapping, key, _GONE) if key in mapping else mapping


class _Layered(Mapping[K, V]):
    """The entries of `base` whose keys have not changed, and then the changes."""

    __slots__ = ("layers",)

    def __init__(self, base: Mapping[K, V], changes: Mapping[K, V]) -> None:
        self.layers: tuple[Mapping[Any, V], Mapping[Any, V]] = base, changes

    def pairs(self) -> Iterator[tuple[K, V]]:
        """Keys and values that are there, those changed last at the end."""
        base, changes = self.layers
        yield from (pair for pair in base.items() if pair[0] not in changes)
        yield from (pair for pair in changes.items() if pair[1] is not _GONE)

    def get(self, key: object, default: Any = None, /) -> Any:
        base, changes = self.layers
        if key not in changes:
            return base.get(key, default)
        value = changes[key]
        return default if value is _GONE else value

    def __getitem__(self, key: K) -> V:
        value: V = self.get(key, _GONE)
        if value is _GONE:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return self.get(key, _GONE) is not _GONE

    def __len__(self) -> int:
        base, changes = self.layers
        return len(base) + sum((v is not _GONE) - (k in base) for k, v in changes.items())

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.pairs())

    # The views of Mapping look each key up.

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def __repr__(self) -> str:
        return repr(dict(self.pairs()))


class _Items(ItemsView[K, V]):
    _mapping: _Layered[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._mapping.pairs()


class _Values(ValuesView[V]):
    _mapping: _Layered[Any, V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.pairs())
