"""Everything that an outsider can do who reaches the port of an open coordinator, done there; and
refused by a closed one, without a certificate or under that of another site."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest

from integration.conftest import Start
from support.closed_coordinator import MODEL, ROUNDS, SITES, UPDATES, ClosedCoordinator, outcome_of
from support.wire import Code, Member, assert_refused, npy, refused
from xain_foundation.security.identity import Role
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2
from xain_workloads.tables.preprocessing import preprocessing_of
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table

UNAUTHENTICATED = "UNAUTHENTICATED UNAUTHENTICATED"
INSTANCE = "xain-instance-id"

# An outsider who says that it is of this name, or says none.
Outsider = Callable[[str | None], Member]
Attack = Callable[[Outsider], Awaitable[Any]]


async def read_the_model(outsider: Outsider) -> bytes:
    return await outsider(None).download("1/global")


async def read_the_figures_of_sites(outsider: Outsider) -> list[str]:
    inspection = outsider(None).inspection
    answer = await inspection.ListParticipants(inspection_pb2.ListParticipantsRequest())
    return [one.participant_id for one in answer.participants]


async def hand_in_for_another(outsider: Outsider) -> None:
    await outsider("ward-1").hand_in(MODEL - 1e6, round_=1)


async def end_the_session_of_another_site(outsider: Outsider) -> None:
    await outsider("ward-1").heartbeat(pb.FINISHED)


async def take_a_name_first(outsider: Outsider) -> None:
    await outsider("ward-3").rendezvous()


ATTACKS: dict[Attack, str] = {
    read_the_model: "let in",  # under the certificate of a site, which may
    read_the_figures_of_sites: "let in",  # to its own
    hand_in_for_another: UNAUTHENTICATED,
    end_the_session_of_another_site: UNAUTHENTICATED,
    take_a_name_first: UNAUTHENTICATED,
}


@pytest.fixture
async def opened(start: Start) -> Any:
    """An open coordinator in round 1 of two honest sites, and outsiders."""
    coordinator = await start(rounds=ROUNDS)
    members = []

    def outsider(says: str | None) -> Member:
        members.append(Member(coordinator.port, says))
        return members[-1]

    for name in SITES:
        outsider(name).metadata += ((INSTANCE, f"{name} itself"),)
        await members[-1].rendezvous()
    for member, update in zip(tuple(members), UPDATES.values(), strict=True):
        await member.until(pb.ROUND, 0)
        await member.hand_in(update)
    for member in tuple(members):
        await member.until(pb.ROUND, 1)
    yield coordinator, members[0], outsider
    for member in members:
        await member.close()


async def test_outsider_reads_model_and_sites_of_an_open_coordinator(opened):
    _, _, outsider = opened
    assert await read_the_model(outsider) == npy(MODEL + 2)
    assert await read_the_figures_of_sites(outsider) == list(SITES)


async def test_outsider_hands_in_for_another_at_an_open_coordinator(opened):
    """The instance id is left out, so the outsider is taken for the owner, whose own update is then
    a second one."""
    _, owner, outsider = opened
    await hand_in_for_another(outsider)
    await assert_refused(
        owner.hand_in(UPDATES["ward-1"], round_=1), Code.ALREADY_EXISTS, "DUPLICATE_UPDATE"
    )


async def test_outsider_ends_the_session_of_a_site_at_an_open_coordinator(opened):
    coordinator, owner, outsider = opened
    await end_the_session_of_another_site(outsider)
    assert "ward-1" not in coordinator.driver.session.members
    assert (await refused(owner.heartbeat()))[1] == "NOT_A_MEMBER"


async def test_outsider_takes_a_name_first_at_an_open_coordinator(opened):
    _, _, outsider = opened
    thief, owner = outsider("ward-3"), outsider("ward-3")
    thief.metadata += ((INSTANCE, "the thief"),)
    owner.metadata += ((INSTANCE, "the owner"),)
    await thief.rendezvous()
    assert (await refused(owner.rendezvous()))[1] == "DUPLICATE_INSTANCE"


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_outsider_is_refused_by_a_closed_coordinator(closed, said, attack):
    await closed.close_round()
    await closed.sites[0].until(pb.ROUND, 1)
    closed.remember()

    def without_certificate(says: str | None) -> Member:
        credentials = grpc.ssl_channel_credentials(closed.authority.certificate)
        closed.members.append(Member(closed.port, says, credentials))
        return closed.members[-1]

    def another_site(says: str | None) -> Member:
        return closed.member(Role.PARTICIPANT, "mallory", says)

    assert await outcome_of(attack(without_certificate), said.messages) == "UNAVAILABLE"
    assert await outcome_of(attack(another_site), said.messages) == ATTACKS[attack]
    closed.require_unchanged()
    if attack is read_the_figures_of_sites:
        assert not set(await attack(another_site)) & set(SITES)
    await closed.close_round(1)


# --- samples ---


async def with_two_billion_samples(member: Member, sites: list[Member]) -> None:
    """A third site hands in with the others, and has 2e9 samples as it says."""
    await member.until(pb.ROUND, 1)
    await member.hand_in(MODEL - 1e6, num_samples=2_000_000_000, round_=1)
    for site, update in zip(sites, UPDATES.values(), strict=True):
        await site.hand_in(update, round_=1)
    await sites[0].until(pb.ROUND, 2)


async def test_site_that_decides_the_model_alone_is_a_warning(closed, said):
    """An outsider cannot; a site that may take part is named, and bound by what it declared
    first."""
    mallory = closed.member(Role.PARTICIPANT, "mallory")
    await mallory.rendezvous()
    await closed.close_round()
    await with_two_billion_samples(mallory, closed.sites)
    operator = closed.member(Role.OPERATOR, "alice").inspection
    status = await operator.GetStatus(inspection_pb2.GetStatusRequest())
    assert "mallory" in str([one for one in status.warnings if "max_share" in one])
    closed.remember()
    await mallory.until(pb.ROUND, 2)
    update = mallory.hand_in(MODEL, num_samples=2_000_000_001, round_=2)
    assert await outcome_of(update, said.messages) == "INVALID_ARGUMENT INVALID_UPDATE"


# --- tables ---

SGD = {"workload": {"name": "sgd"}}
HONEST = np.random.default_rng(3).normal(61.0, 12.0, 40)


def profile_of(column: str, values: np.ndarray) -> pb.DataProfile:
    labels = np.array(["no", "yes"] * (len(values) // 2))
    known = Table((Column(column),), {column: values}, labels).profile(min_known=1)
    return pb.DataProfile(
        num_samples=known.num_samples,
        num_features=known.num_features,
        classes=known.classes,
        columns=[pb.Column(name=one.name, type=one.type) for one in known.columns],
        statistics=known.statistics,
    )


async def read_the_mean_of_another(outsider: Outsider) -> float:
    """Join with a table of two rows, and take them off what the model is prepared by."""
    member, own = outsider("outsider"), np.array([60.0, 62.0])
    await member.rendezvous(profile_of("age", own))
    await member.until(pb.ROUND, 0)
    preprocessing = preprocessing_of((await member.start()).metadata)
    mean, rows = preprocessing.numbers[0].scale.center, len(HONEST) + len(own)
    return float((mean * rows - own.sum()) / len(HONEST))


async def join_first_with_a_nonsense_table(outsider: Outsider) -> None:
    await outsider("outsider").rendezvous(profile_of("nonsense", HONEST))


async def test_outsider_reads_the_mean_of_a_site_of_an_open_coordinator(start, join):
    coordinator = await start(**SGD, rounds=ROUNDS)
    await join(coordinator, "ward-1").rendezvous(profile_of("age", HONEST))
    found = await read_the_mean_of_another(lambda says: join(coordinator, says))
    assert found == pytest.approx(HONEST.mean())


async def test_nonsense_table_of_an_outsider_shuts_sites_out_of_an_open_coordinator(start, join):
    coordinator = await start(**SGD, rounds=ROUNDS)
    await join_first_with_a_nonsense_table(lambda says: join(coordinator, says))
    honest = join(coordinator, "ward-1").rendezvous(profile_of("age", HONEST))
    assert (await refused(honest))[1] == "PROFILE_MISMATCH"


@pytest.mark.parametrize("attack", [read_the_mean_of_another, join_first_with_a_nonsense_table])
async def test_table_of_an_outsider_is_refused_by_a_closed_coordinator(
    start, guard, tmp_path, secrets, said, attack
):
    """The sites that are honest train meanwhile."""
    coordinator = await start(**SGD, guard=guard, rounds=ROUNDS)
    closed = ClosedCoordinator(tmp_path, guard, coordinator, secrets)

    def outsider(says: str | None) -> Member:
        credentials = grpc.ssl_channel_credentials(closed.authority.certificate)
        closed.members.append(Member(closed.port, says, credentials))
        return closed.members[-1]

    assert await outcome_of(attack(outsider), said.messages) == "UNAVAILABLE"
    for site in closed.sites:
        await site.rendezvous(profile_of("age", HONEST))
    await closed.sites[0].until(pb.ROUND, 0)
    assert set(coordinator.driver.session.members) == set(SITES)
    await closed.end()


async def test_nonsense_of_a_site_that_comes_first_is_refused_alone(
    start, guard, tmp_path, secrets, said
):
    """No honest site ends: the first of them waits, the second outvotes the nonsense with it."""
    coordinator = await start(**SGD, guard=guard, rounds=ROUNDS)
    closed = ClosedCoordinator(tmp_path, guard, coordinator, secrets)
    mallory = closed.member(Role.PARTICIPANT, "mallory")
    await mallory.rendezvous(profile_of("nonsense", HONEST))
    first, second = closed.sites
    answer = await first.rendezvous(profile_of("age", HONEST))
    said.messages.append(answer.why)
    assert answer.reply == pb.LATER
    assert "'nonsense'" in answer.why
    assert (await second.rendezvous(profile_of("age", HONEST))).reply == pb.ACCEPT
    assert (await refused(mallory.heartbeat()))[1] == "NOT_A_MEMBER"
    assert (await mallory.rendezvous(profile_of("nonsense", HONEST))).reply == pb.LATER
    assert (await first.rendezvous(profile_of("age", HONEST))).reply == pb.ACCEPT
    await first.until(pb.ROUND, 0)
    told = await outcome_of(mallory.rendezvous(profile_of("nonsense", HONEST)), said.messages)
    assert told == "INVALID_ARGUMENT PROFILE_MISMATCH"
    assert set(coordinator.driver.session.members) == set(SITES)
    await closed.end()
