"""Tags: who may be selected, and who is only here."""

import re

import pytest
from tests.unit.core.bench import LEASE_S, PROFILE, Bench, make_rules

from xain_coordinator.core.machine.decider import next_deadline
from xain_coordinator.core.machine.questions import AssignmentFor
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import InitialiseModel
from xain_coordinator.core.vocabulary.values import DataProfile, Phase

NORTH = {"site": "north", "ward": "7"}
SOUTH = {"site": "south"}


def northern(**rules: object) -> Bench:
    return Bench(make_rules(tags={"site": ("north",)}, **rules))  # type: ignore[arg-type]  # all


def test_without_a_filter_all_are_eligible() -> None:
    bench = Bench(make_rules(min_participants=2))
    bench.join("a", tags=SOUTH)
    bench.join("b")
    assert bench.selected == ("a", "b")


@pytest.mark.parametrize(
    ("tags", "is_eligible"),
    [
        ({"site": "north"}, False),
        ({"site": "north", "ward": "7"}, True),
        ({"site": "south", "ward": "7", "more": ""}, True),
        ({"site": "west", "ward": "7"}, False),
        ({"site": "north", "ward": "8"}, False),
        ({"ward": "7"}, False),
        ({}, False),
    ],
)
def test_each_tag_that_is_asked_for_must_have_one_of_its_values(
    tags: dict[str, str], is_eligible: bool
) -> None:
    rules = make_rules(tags={"site": ("north", "south"), "ward": ("7",)})
    assert rules.is_eligible("ward-7", tags) is is_eligible


def test_only_those_with_the_tags_are_counted_and_selected() -> None:
    """The others are connected, hear STANDBY, and take no slot."""
    bench = northern(rounds=2, min_participants=2, controller="all")
    bench.join("a", tags=NORTH)
    bench.join("s", "t", tags=SOUTH)
    assert bench.phase is Phase.STANDBY, "one of two is here"
    bench.join("b", tags=NORTH)
    assert bench.selected == ("a", "b")
    assert bench.heartbeat("s").phase is Phase.STANDBY
    bench.refuses(AssignmentFor("s"), errors.NotSelected)
    bench.end("a")
    bench.leave("b")
    assert bench.phase is Phase.STANDBY, "nobody from the south takes its place"
    assert bench.selected == ("a",)
    bench.join("c", tags=NORTH)
    assert bench.selected == ("a", "c")
    bench.end("c")
    assert bench.selected == ("a", "c"), "the next round"
    assert bench.connected == ("a", "s", "t", "c")


def test_an_overdue_round_asks_only_eligible_participants() -> None:
    bench = northern(min_participants=2, start_participants=3, fraction="0.6", deadline_s=5.0)
    bench.join("s", tags=SOUTH)
    bench.join("a", "b", "c", tags=NORTH)
    assert len(bench.selected) == 2
    bench.tick(at=5.0)
    assert set(bench.selected) == {"a", "b", "c"}


def test_the_fraction_is_of_the_eligible() -> None:
    bench = northern(fraction="0.5", start_participants=4)
    bench.join(*"stuvwx", tags=SOUTH)
    bench.join(*"abcd", tags=NORTH)
    assert len(bench.selected) == 2


def test_the_start_timeout_begins_with_the_first_eligible_participant() -> None:
    bench = northern(start_participants=2)
    bench.join("s", tags=SOUTH, at=0.0)
    assert next_deadline(bench.session) == LEASE_S
    bench.join("a", tags=NORTH, at=10.0)
    bench.pass_time(59.0)
    assert bench.phase is Phase.STANDBY
    bench.pass_time(1.0)
    assert bench.selected == ("a",)


def test_the_model_is_made_for_the_data_of_the_eligible() -> None:
    """Data that are not trained on must not decide how wide the model is, nor keep others out."""
    bench = northern(min_participants=2)
    bench.answers = False
    bench.join("s", tags=SOUTH, profile=DataProfile(5, 99))
    bench.join("a", "b", tags=NORTH)
    assert bench.owed == [InitialiseModel("workload", (PROFILE, PROFILE), names=("a", "b"))]


def test_participants_that_are_not_eligible_take_no_slots_of_the_others() -> None:
    """Participants that are not eligible have as many slots of their own, and no more."""
    bench = northern(min_participants=2, max_participants=2)
    bench.join("s", "t", tags=SOUTH)
    assert bench.join("u", tags=SOUTH) == r.Later(LEASE_S)
    bench.join("a", "b", tags=NORTH)
    assert bench.selected == ("a", "b")
    assert bench.join("c", tags=NORTH) == r.Later(LEASE_S)
    assert bench.session.rules.max_connected == len(bench.connected) == 4


def test_a_known_participant_keeps_the_tags_that_it_came_with() -> None:
    """The tags, as the profile, stay for the lease; after it the participant comes with others."""
    bench = northern(min_participants=2)
    bench.join("a", tags=SOUTH)
    bench.join("a", tags=NORTH)
    assert bench.session.members.num_eligible == 0
    bench.leave("a")
    bench.join("a", tags=NORTH)
    assert bench.session.members.num_eligible == 1


def test_tags_are_in_the_journal() -> None:
    bench = northern(min_participants=2)
    bench.join("a", tags=NORTH)
    assert bench.happened(e.ParticipantJoined)[0].tags == NORTH
    bench.restart()
    bench.join("b", tags=NORTH)
    assert bench.selected == ("a", "b")


@pytest.mark.parametrize(
    ("tags", "why"),
    [
        ({"": "x"}, "''"),
        ({"a b": "x"}, "'a b'"),
        ({"a=b": "x"}, "'a=b'"),
        ({"k" * 65: "x"}, r"'k{32}\.\.\. \(65 characters\)'"),
        ({"é": "x"}, "'é'"),
        ({"a": "x" * 257}, "value of the tag 'a'"),
        ({"a": "\x1b[2J"}, "value of the tag 'a'"),
        ({"a": "\ud800"}, "value of the tag 'a'"),
        ({f"k{i}": "" for i in range(33)}, "33 tags"),
    ],
)
def test_tags_that_are_not_to_be_kept_are_refused(tags: dict[str, str], why: str) -> None:
    bench = Bench(make_rules(min_participants=2))
    refusal = bench.refuses(c.Rendezvous("a", PROFILE, tags), errors.InvalidTags)
    assert re.search(why, str(refusal)), refusal
    assert bench.connected == ()


def test_as_many_tags_and_as_long_ones_as_there_may_be() -> None:
    bench = Bench(make_rules(min_participants=2))
    bench.join("a", tags={f"{i:064}": "é" * 128 for i in range(32)})
    assert bench.connected == ("a",)
