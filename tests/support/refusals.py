"""Refusals by their reason."""

from typing import Any

import pytest

from xain_wire.refusal import CaughtRefusal, Refusal

Why = type[CaughtRefusal] | str  # a class for one reason, or the reason


def is_refused(outcome: object, why: Why) -> bool:
    """Whether a command was refused for this reason, and for exactly this one."""
    code = why if isinstance(why, str) else why.code
    return isinstance(outcome, Refusal) and outcome.code == code


def refused_as(code: str, match: str | None = None) -> Any:
    """A context in which a command is refused for this reason."""
    return pytest.raises(Refusal, match=match, check=lambda refusal: refusal.code == code)
