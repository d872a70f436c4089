"""Rounds as an operator, a participant and a script are told of them."""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from xain_coordinator.core.view.records import MAX_NAMES_OF_A_ROUND, RoundRecord
from xain_coordinator.core.vocabulary.values import Phase, Task
from xain_coordinator.driver.driver import Driver
from xain_coordinator.server.calls.translate import evaluation_message, wire_task
from xain_coordinator.server.identity import certified_site
from xain_wire.fl import inspection_pb2 as inspection

# Keeps an answer below 4 MiB, which a gRPC client takes unless told otherwise. A participant with
# the names of its classes takes up to 300 KB.
MAX_BYTES = 3 << 20


def round_messages(
    driver: Driver, records: Iterable[RoundRecord]
) -> Iterator[tuple[inspection.RoundStatus, bool]]:
    """Messages of rounds of the session, and whether each is whole: where one answer has no room
    for more, a round lacks its names, sites or means. A participant with a certificate is told of
    itself, and of what all have together."""
    room = MAX_BYTES
    for record in records:
        status, is_whole = _round(driver, record), True
        site = certified_site()
        for more in (_means(record), _names(record), _sites(record)):
            if site is not None:
                _keep_own_of_round(more, site)
            if (size := more.ByteSize()) <= room:
                status.MergeFrom(more)
                room -= size
            else:
                is_whole = False
        yield status, is_whole


def _round(driver: Driver, record: RoundRecord) -> inspection.RoundStatus:
    """The part of a round's message that is always sent: its phase, times and numbers."""
    seconds = record.seconds
    phase = "published"
    if seconds is None:
        session = driver.session
        is_over = session.phase is Phase.FINISHED
        seconds = (session.since if is_over else driver.clock.now()) - record.opened_at
        phase = "ended" if is_over else session.phase.value
    if record.task is Task.EVALUATE:
        phase = "evaluating" if record.seconds is None else "evaluated"
    return inspection.RoundStatus(
        round=record.round,
        phase=phase,
        num_samples=record.num_samples,
        opened_seconds=record.opened_at,
        seconds=seconds,
        num_selected=record.num_selected,
        num_contributors=record.num_contributors,
        task=wire_task(record.task),
        num_missing=record.num_missing,
    )


def _means(record: RoundRecord) -> inspection.RoundStatus:
    """The part of a round's message with evaluations and metrics of all sites together."""
    return inspection.RoundStatus(
        evaluation=evaluation_message(record.evaluation, of_sites=True),
        coordinator_evaluation=evaluation_message(record.coordinator_evaluation),
        metrics=record.metrics,
        spread={
            name: inspection.Spread(min=one.min, max=one.max, std=one.std)
            for name, one in record.spread.items()
        },
    )


def _names(record: RoundRecord) -> inspection.RoundStatus:
    """The part of a round's message with names of participants; empty if they are many."""
    if not record.names_are_few:
        return inspection.RoundStatus()
    return inspection.RoundStatus(
        selected=record.selected,
        contributors=record.contributors,
        damaged_updates=record.damaged,
        missing=record.missing,
    )


def _sites(record: RoundRecord) -> inspection.RoundStatus:
    """The part of a round's message with the figures of single sites; empty if they are many."""
    if len(record.sites) > MAX_NAMES_OF_A_ROUND:
        return inspection.RoundStatus()
    return inspection.RoundStatus(
        sites=[
            inspection.SiteMetrics(
                participant_id=participant_id,
                num_samples=site.num_samples,
                metrics=site.metrics,
                evaluation=evaluation_message(site.evaluation),
            )
            for participant_id, site in sorted(record.sites.items())
        ]
    )


def _keep_own_of_round(part: inspection.RoundStatus, site: str) -> None:
    """Drop from a part of a round all that tells of other participants than this one."""
    for names in (part.selected, part.contributors):
        own = [name for name in names if name == site]
        del names[:]
        names.extend(own)
    keep_own(part.damaged_updates, site)
    keep_own(part.missing, site)
    figures = [one for one in part.sites if one.participant_id == site]
    del part.sites[:]
    part.sites.extend(figures)
    part.ClearField("spread")  # of two sites it would tell the other's figures


def keep_own(values: MutableMapping[str, Any], site: str) -> None:
    """Drop all keys but that of one participant."""
    for name in [name for name in values if name != site]:
        del values[name]
