"""Tags: who may be selected, and who is only here."""

import re

import pytest
from tests.unit.core.bench import PROFILE, Bench, make_rules

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary.effects import InitialiseModel
from xain_coordinator.core.vocabulary.values import DataProfile

NORTH = {"site": "north", "ward": "7"}
SOUTH = {"site": "south"}


def northern(**rules: object) -> Bench:
    return Bench(make_rules(tags={"site": ("north",)}, **rules))  # type: ignore[arg-type]  # all


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
def test_each_tag_that_is_asked_for_must_have_one_of_its_values(tags, is_eligible):
    rules = make_rules(tags={"site": ("north", "south"), "ward": ("7",)})
    assert rules.is_eligible("ward-7", tags) is is_eligible


def test_the_model_is_made_for_the_data_of_the_eligible():
    """Data that are not trained on must not decide how wide the model is, nor keep others out."""
    bench = northern(min_participants=2)
    bench.answers = False
    bench.join("s", tags=SOUTH, profile=DataProfile(5, 99))
    bench.join("a", "b", tags=NORTH)
    assert bench.owed == [InitialiseModel("workload", (PROFILE, PROFILE), names=("a", "b"))]


def test_a_known_participant_keeps_the_tags_that_it_came_with():
    """The tags, as the profile, stay for the lease; after it the participant comes with others."""
    bench = northern(min_participants=2)
    bench.join("a", tags=SOUTH)
    bench.join("a", tags=NORTH)
    assert bench.session.members.num_eligible == 0
    bench.leave("a")
    bench.join("a", tags=NORTH)
    assert bench.session.members.num_eligible == 1


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
def test_tags_that_are_not_to_be_kept_are_refused(tags, why):
    bench = Bench(make_rules(min_participants=2))
    refusal = bench.refuses(c.Rendezvous("a", PROFILE, tags), "INVALID_TAGS")
    assert re.search(why, str(refusal)), refusal
    assert bench.connected == ()


def test_as_many_tags_and_as_long_ones_as_there_may_be():
    bench = Bench(make_rules(min_participants=2))
    bench.join("a", tags={f"{i:064}": "é" * 128 for i in range(32)})
    assert bench.connected == ("a",)
