"""Durable events as text."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xain_coordinator.core.vocabulary.events import (
    DurableEvent,
    ParticipantJoined,
    RoundOpened,
    SessionOpened,
)
from xain_coordinator.core.vocabulary.values import GlobalModel, Rules
from xain_coordinator.journal.codec import decode, encode
from xain_coordinator.ports import JournalError

# A mapping may be anything to hypothesis; the core makes dicts.
st.register_type_strategy(
    Mapping, lambda kind: st.dictionaries(*(st.from_type(each) for each in get_args(kind)))
)
# What has a default is drawn as well.
st.register_type_strategy(GlobalModel, st.builds(GlobalModel, metadata=..., state=...))
st.register_type_strategy(ParticipantJoined, st.builds(ParticipantJoined, tags=...))
# It does not know types that are named for their recursion.
EXPRESSIONS = st.recursive(st.text(), lambda inner: st.lists(inner).map(tuple))
LATER_FIELDS = {
    f.name: ...
    for f in fields(Rules)
    if f.default is not MISSING or f.default_factory is not MISSING
}
st.register_type_strategy(Rules, st.builds(Rules, **{**LATER_FIELDS, "quorum": EXPRESSIONS}))


@pytest.mark.parametrize("kind", get_args(DurableEvent))
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=50)
@given(data=st.data())
def test_every_event_comes_back_exactly(kind, data):
    # What is not a number is not equal to itself; the core has no use for it.
    events = st.from_type(kind).filter(lambda event: "nan" not in repr(event))
    event = data.draw(events)
    name, body = encode(event)
    again = decode(name, body)
    assert again == event
    assert type(again) is kind
    # Equality does not tell 1 from 1.0 from True, nor one order of a mapping from another.
    assert repr(again) == repr(event)


def test_format_never_changes():
    """Journals that exist must be readable by the next version."""
    before = '{"round":3,"selected":["a","b"],"epochs":1,"at":0.1,"num_wanted":2'
    opened = RoundOpened(3, ("a", "b"), 1, 0.1, 2)
    assert encode(opened) == ("RoundOpened", before + ',"task":"train","absent":[]}')
    assert decode("RoundOpened", before + "}") == opened
    rules = Rules(3, 1, 1, Fraction(6, 8), 1, 9, 1, 5.0, "c", "a", 2**80, 1.0, 2.5, "empty")
    _, body = encode(SessionOpened("s", rules, 0.0))
    assert json.loads(body)["rules"]["fraction_participants"] == "3/4"


@pytest.mark.parametrize("name", ["Nothing", "ParticipantHeard", "str", ""])
def test_an_unknown_type_is_named(name):
    with pytest.raises(JournalError, match=repr(name)):
        decode(name, "{}")


@pytest.mark.parametrize("body", ["", "{}", '{"round":1},{"round":2}', '{"round":1.0}', "1"])
def test_a_body_that_does_not_fit(body):
    with pytest.raises(JournalError, match=r"RoundClosed .*not readable"):
        decode("RoundClosed", body)
