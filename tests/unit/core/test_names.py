"""Names of participants and of their uploads: they become parts of keys."""

import pytest
from tests.unit.core.bench import PROFILE, Bench, make_rules, opened_round

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
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
def test_a_participant_cannot_have_a_name_that_is_no_part_of_a_key(name: str) -> None:
    """Updates under such a name would lie elsewhere, or over the global model."""
    bench = Bench(make_rules(min_participants=2))
    bench.refuses(c.Rendezvous(name, PROFILE), errors.InvalidName)
    assert bench.connected == ()


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "Global",
        "ipv4:127.0.0.1:60870",
        "ipv6:%5B::1%5D:50051",
        "unix:",
        "x" * MAX_BYTES,
        "Klinik Koeln",
        ".hidden",
    ],
)
def test_ordinary_names_are_taken(name: str) -> None:
    """Peer addresses are names, too: those of participants who give none."""
    bench = Bench(make_rules(min_participants=2))
    assert isinstance(bench.join(name), r.Accepted)
    assert bench.connected == (name,)


@pytest.mark.parametrize("gone", ["stays", "leaves", "expires"])
def test_an_upload_counts_once(gone: str) -> None:
    """Clients of XAIN's SDK choose names for their uploads in a bucket that all can reach. What was
    accepted under a name is no other participant's update too, not even after a restart."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=2))
    bench.join("c", "d")
    bench.end("a", upload_name="uuid-1")
    if gone != "stays":
        bench.leave("a") if gone == "leaves" else bench.expire("a")
    bench.restart()
    bench.refuses_end(errors.UploadTaken, "b", upload_name="uuid-1")
    bench.end("b")
    assert accepted_keys(bench) == ["0/uuid-1", "0/b"]


def test_upload_name_is_used_again_in_the_next_round() -> None:
    """The same participant uses the name, or one whose connection has replaced the first."""
    bench = opened_round("a", "b")
    bench.end("a", upload_name="uuid-1")
    bench.end("b", upload_name="uuid-2")
    bench.end("a", "next", upload_name="uuid-1")
    bench.leave("b")
    bench.join("b2")
    bench.end("b2", "next", upload_name="uuid-2")
    assert accepted_keys(bench)[2:] == ["1/uuid-1", "1/uuid-2"]


def test_refused_upload_counts_for_a_later_sender() -> None:
    """Only an accepted update takes its upload."""
    bench = opened_round("a", "b")
    bench.refuses_end(errors.InvalidUpdate, "a", upload_name="uuid-1", num_samples=-1)
    bench.end("b", upload_name="uuid-1")


def test_upload_of_another_participant_is_refused() -> None:
    """The upload would count twice: once for each of them."""
    bench = opened_round("a", "z")
    bench.refuses_end(errors.UploadTaken, "a", upload_name="z")
    bench.end("z")
    bench.end("a")
    assert accepted_keys(bench) == ["0/z", "0/a"]


def test_participant_that_joins_hands_in_under_its_id_whatever_another_has_named_its_upload() -> (
    None
):
    """The upload of z itself is another object, with an attempt of its own."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=2))
    bench.end("a", upload_name="z")
    bench.leave("b")
    bench.join("z")
    bench.end("z", "other")
    assert accepted_keys(bench) == ["0/z", "0/z"]


def accepted_keys(bench: Bench) -> list[str]:
    return [one.update.weights.ref.key for one in bench.happened(e.UpdateAccepted)]


def test_uploads_go_under_the_round_and_the_participants_name() -> None:
    bench = opened_round("a", "b")
    assert bench.begin_upload("a").key.startswith("0/a")


@pytest.mark.parametrize("name", ["a", f"a.{'f' * 32}", f"a.{'f' * 32}-1"])
def test_no_name_makes_a_key_of_the_journal(name: str) -> None:
    """Participants choose names; they have no slash."""
    for key in (update_key(3, name), attempt_key(f"3/{name}", "0" * 32)):
        assert not is_journalled(key)
    for key in (attempt_key(f"3/{name}", "0" * 32), journalled_key(f"3/{name}", "0" * 32)):
        assert base_key_of(key) == f"3/{name}"
    assert is_journalled(journalled_key(f"3/{name}", "0" * 32))
