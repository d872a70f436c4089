"""Names of participants and of their uploads: they become parts of keys."""

import pytest
from tests.unit.core.bench import PROFILE, Bench, make_rules, opened_round

from xain_coordinator.core import commands as c
from xain_coordinator.core import errors
from xain_coordinator.core import events as e
from xain_coordinator.core import replies as r
from xain_coordinator.core.questions import MayUpload
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
    """Its updates would lie elsewhere, or over the global model."""
    bench = Bench(make_rules(min_participants=2))
    bench.refuses(c.Rendezvous(name, PROFILE), errors.InvalidName)
    assert bench.connected == ()


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_upload_cannot_have_such_a_name_either(name: str) -> None:
    """The sender is refused, nothing is bound, and a good name is taken afterwards."""
    bench = opened_round("a", "b")
    bench.refuses_end(errors.InvalidName, "a", upload_name=name)
    bench.end("a", upload_name="uuid-1")
    assert bench.session.members.upload_names == {"uuid-1": "a"}


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


def test_the_first_use_binds_an_upload_name() -> None:
    """What a XAIN client calls its upload is its own from then on, durably."""
    bench = opened_round("a", "b")
    bench.end("a", upload_name="uuid-1")
    assert bench.happened(e.UploadNameBound) == [e.UploadNameBound("a", "uuid-1")]
    bench.restart()
    assert bench.session.members.upload_names == {"uuid-1": "a"}


def test_a_bound_name_is_used_again_without_being_bound_again() -> None:
    bench = opened_round("a", "b")
    bench.end("a", upload_name="uuid-1")
    bench.end("b", upload_name="uuid-2")
    bench.end("a", "next", upload_name="uuid-1")
    assert len(bench.happened(e.UploadNameBound)) == 2


def test_ones_own_name_needs_no_binding() -> None:
    bench = opened_round("a", "b")
    bench.end("a")
    assert bench.session.members.upload_names == {}


def test_nobody_hands_in_under_a_name_bound_to_another() -> None:
    """Neither in the round of the binding nor later."""
    bench = opened_round("a", "b")
    bench.end("a", upload_name="uuid-1")
    bench.refuses_end(errors.UploadNameTaken, "b", upload_name="uuid-1")
    bench.end("b")
    bench.refuses_end(errors.UploadNameTaken, "b", "next", upload_name="uuid-1")
    bench.end("b", "next")


def test_nobody_hands_in_under_the_name_of_another_participant() -> None:
    """Whoever is here owns its own name, used or not."""
    bench = opened_round("a", "b")
    bench.refuses_end(errors.UploadNameTaken, "a", upload_name="b")
    bench.end("a")


def test_a_participant_does_not_change_its_upload_name() -> None:
    bench = opened_round("a", "b")
    bench.end("a", upload_name="uuid-1")
    bench.end("b")
    bench.refuses_end(errors.UploadNameTaken, "a", "next", upload_name="uuid-2")
    bench.end("a", "next", upload_name="uuid-1")


def test_a_refused_update_binds_no_name() -> None:
    """Otherwise a typing error would bind its sender for ever."""
    bench = opened_round("a", "b")
    bench.refuses_end(errors.InvalidUpdate, "a", upload_name="uuid-1", num_samples=-1)
    bench.end("a", upload_name="uuid-2")
    bench.end("b", upload_name="uuid-1")


def test_a_name_is_free_again_when_its_owner_has_left() -> None:
    """A XAIN client that reconnects is a new participant with the upload name it had before."""
    bench = opened_round("a", "b", "c")
    bench.end("a", upload_name="uuid-1")
    bench.end("b")
    bench.end("c")
    bench.leave("a")
    assert bench.session.members.upload_names == {}
    bench.join("a2")
    bench.end("a2", upload_name="uuid-1")
    assert bench.session.members.upload_names == {"uuid-1": "a2"}


@pytest.mark.parametrize("name", ["uuid-1", "a"])
@pytest.mark.parametrize("gone", ["leaves", "expires"])
def test_an_accepted_update_is_not_overwritten_after_its_owner_has_left(
    gone: str, name: str
) -> None:
    """The name is free, but not in the round in which an accepted object lies under it: another
    participant could count with that object as well."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=2))
    bench.join("c", "d")
    bench.end("a", upload_name=name)
    bench.leave("a") if gone == "leaves" else bench.expire("a")
    bench.refuses_end(errors.UploadNameTaken, "b", upload_name=name)
    bench.end("b")
    keys = [update.weights.ref.key for update in bench.aggregates[0].updates]
    assert keys == [f"0/{name}", "0/b"]


def test_a_name_chosen_before_its_namesake_came_does_not_let_it_be_overwritten() -> None:
    """a uploads as "z"; then z itself joins and is selected. Its upload would go over a's."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=2))
    bench.end("a", upload_name="z")
    bench.leave("b")
    bench.join("z")
    bench.join("y")
    assert bench.selected == ("a", "z")
    bench.refuses(MayUpload("z", 0, "other"), errors.UploadNameTaken)
    bench.refuses_end(errors.UploadNameTaken, "z", "other")
    bench.end("z", "other", upload_name="uuid-9")
    keys = [update.weights.ref.key for update in bench.aggregates[0].updates]
    assert keys == ["0/z", "0/uuid-9"]


def test_a_participants_own_name_goes_before_one_that_another_chose() -> None:
    """From the next round on z hands in as z, and a, who had taken the name, must take another."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=2, start_participants=2))
    bench.end("a", upload_name="z")
    bench.join("z")
    assert bench.session.members.upload_names == {}
    bench.end("b")
    assert bench.session.round == 1
    bench.leave("b")
    assert set(bench.selected) == {"a", "z"}
    assert bench.begin_upload("z") == r.UploadTo("1/z")
    bench.end("z", "of z")
    bench.refuses_end(errors.UploadNameTaken, "a", "of a", upload_name="z")
    bench.end("a", "of a", upload_name="uuid-1")


def test_uploads_go_under_the_round_and_the_participants_name() -> None:
    bench = opened_round("a", "b")
    assert bench.begin_upload("a") == r.UploadTo("0/a")
