"""A session and a round are made anew with every message, by a `replace` of their own."""

import dataclasses
from functools import cached_property

import pytest
from tests.unit.core.bench import Bench, make_rules

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary.replacing import replace
from xain_coordinator.core.vocabulary.values import Phase


def test_replace_equals_that_of_dataclasses():
    bench = Bench(make_rules(min_participants=2))
    bench.join("a", "b")
    bench.answer()
    session = bench.session
    for value, changes in (
        (session, {}),
        (session, {"round": 7, "phase": Phase.FINISHED, "members": {}}),
        (session.opened, {"overdue_at": 3.0, "updates": {}}),
    ):
        changed = replace(value, **changes)
        assert changed == dataclasses.replace(value, **changes)
        assert (changed == value) == (not changes)
        assert changed is not value
    assert (session.round, session.phase) == (0, Phase.COLLECTING)


def test_there_is_no_field_of_another_name():
    with pytest.raises(AssertionError, match=r"Session has not all of .*'rounds'"):
        replace(Bench(make_rules()).session, rounds=7)


@pytest.mark.parametrize("kind", [Session, Round])
def test_values_have_no_cached_properties(kind):
    """A cached property would be copied too, and be that of the value before."""
    attributes = {name: it for of in kind.__mro__ for name, it in vars(of).items()}
    assert [name for name, it in attributes.items() if isinstance(it, cached_property)] == []
