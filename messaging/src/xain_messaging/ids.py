"""Ids that no other process makes: random letters of this process, and a number.

A random number for each would do as well, and cost more than all else that a message is made of.
"""

import itertools
import os
import secrets
from collections.abc import Iterator

_RANDOM_BYTES = 12

_ids: Iterator[str]


def _begin() -> None:
    global _ids
    _ids = map((secrets.token_hex(_RANDOM_BYTES) + "-%012x").__mod__, itertools.count())


_begin()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_begin)


def new_id() -> str:
    """Short text, always as long. Safe for several threads, and after a fork."""
    return next(_ids)
