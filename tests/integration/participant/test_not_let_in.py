"""A site more than the session needs: it trains too, or the end of the session names it."""

import asyncio
from typing import Any

import numpy as np
import pytest

from integration.conftest import config_for
from support.logs import capture_logs
from xain_coordinator.cli.report.files import snapshot_of_files
from xain_coordinator.cli.report.page import page
from xain_coordinator.inspection.client import ask_service
from xain_participant import Participant


class Halves(Participant):
    def init_weights(self) -> Any:
        return np.zeros(4, dtype=np.float32)

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        return weights / np.float32(2), 1


def sites() -> dict[str, Participant]:
    return {name: Halves() for name in ("a", "b", "c")}


async def test_minimum_alone_is_no_maximum(start, take_part):
    """All three sites that come to a session of at least two train."""
    rounds = {"rounds": 3, "min_participants": 2, "start_participants": 3, "start_timeout_s": 60.0}
    coordinator = await start(rounds=rounds)
    assert coordinator.driver.session.rules.max_participants > 3
    assert await take_part(coordinator, sites()) == {"a": 0, "b": 0, "c": 0}
    assert coordinator.driver.history.accounts.contributions() == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_site_that_was_never_let_in_is_named_at_the_end(
    start, take_part, tmp_path, is_restarted
):
    """The site ends with a status of its own; status, report and the last lines of the log have its
    name and the reason, also from the journal alone."""
    rounds = {"rounds": 3, "min_participants": 2, "max_participants": 2}
    # A site that waits asks again after a lease, which must outlast a machine that is busy.
    server = {"heartbeat_time_s": 0.2, "heartbeat_timeout_s": 5.0}
    coordinator = await start(rounds=rounds, server=server)
    with capture_logs() as logs:
        ends = await take_part(coordinator, sites())
    (outside,) = (name for name, status in ends.items() if status == 5)
    assert sorted(ends.values()) == [0, 0, 5]
    why = "rounds.max_participants, 2, were connected"
    (line,) = (line for line in logs if line["event"] == "participants_not_let_in")
    assert (line["log_level"], line["reasons"]) == ("warning", {outside: why})
    (told,) = (line for line in logs if line["event"] == "exiting" and line["code"] == 5)
    assert told["participant"] == outside
    if is_restarted:
        await coordinator.stop()
        config = config_for(tmp_path)
        snapshot = await asyncio.to_thread(snapshot_of_files, config)
    else:
        snapshot = await ask_service(coordinator.server.inspection, everything=True)
    assert dict(snapshot.status.not_admitted) == {outside: why}
    warning = f"'{outside}' was not let in: {why}."
    assert warning in snapshot.status.warnings
    assert why in page(snapshot)
