"""Ids that no other process makes: random letters of this process, and a number.

A random number for each would do as well, and cost more than all else that a message is made of.
"""

import itertools
import os
import secrets

_RANDOM_BYTES = 12

_letters: str
_numbers = itertools.count(10**11)  # of twelve digits


def _begin() -> None:
    global _letters
    _letters = secrets.token_hex(_RANDOM_BYTES)


_begin()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_begin)


def new_id() -> str:
    """Short text, always as long. Safe for several threads, and after a fork."""
    return f"{_letters}-{next(_numbers)}"
