"""Names of participants and of their uploads: they become parts of keys."""

import pytest
from tests.unit.core.bench import PROFILE, Bench, make_rules, opened_round

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.keys import (
    attempt_key,
    base_key_of,
    is_journalled,
    journalled_key,
    update_key,
)
from xain_foundation.names import MAX_BYTES

BAD_NAMES = [
    "",
    "global",
    "a/b",
    "/",
    "..",
    "../global",
    "a..b",
    ".",
    "a\\b",
    "a\nb",
    "a\x00b",
    "\ud800",
    "x" * (MAX_BYTES + 1),
    "Klinik Köln",
    " a",
    "a ",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_participant_cannot_have_a_name_that_is_no_part_of_a_key(name):
    """Updates under such a name would lie elsewhere, or over the global model."""
    bench = Bench(make_rules(min_participants=2))
    bench.refuses(c.Rendezvous(name, PROFILE), "INVALID_NAME")
    assert bench.connected == ()


def test_participant_that_joins_hands_in_under_its_id_whatever_another_has_named_its_upload():
    """The upload of z itself is another object, with an attempt of its own."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=2))
    bench.end("a", upload_name="z")
    bench.leave("b")
    bench.join("z")
    bench.end("z", "other")
    accepted = bench.happened(e.UpdateAccepted)
    assert [one.update.weights.ref.key for one in accepted] == ["0/z", "0/z"]


@pytest.mark.parametrize("name", ["a", f"a.{'f' * 32}", f"a.{'f' * 32}-1"])
def test_no_name_makes_a_key_of_the_journal(name):
    """Participants choose names; they have no slash."""
    for key in (update_key(3, name), attempt_key(f"3/{name}", "0" * 32)):
        assert not is_journalled(key)
    for key in (attempt_key(f"3/{name}", "0" * 32), journalled_key(f"3/{name}", "0" * 32)):
        assert base_key_of(key) == f"3/{name}"
    assert is_journalled(journalled_key(f"3/{name}", "0" * 32))
