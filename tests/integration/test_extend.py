"""`xain-coordinator extend` on what a coordinator left: which sessions it extends, and how."""

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from integration.conftest import config_for
from support.wire import Member
from xain_coordinator.assembly.changed_rules import require_same_rules
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.cli import main as cli
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_foundation.exit_statuses import CannotStart
from xain_wire.fl import coordinator_pb2 as pb


def extend(folder: Path, rounds: str, *flags: str) -> Result:
    return CliRunner().invoke(
        cli.app, ["extend", f"--data-dir={folder}", "--rounds", rounds, *flags]
    )


def refusal(result: Result, code: int = 1) -> str:
    """The one line of a command that did nothing."""
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    return line


async def train(
    coordinator: SessionCoordinator, member: Member, rounds: int, epochs: int = 1
) -> None:
    """A whole session of a model of two numbers."""
    await member.rendezvous()
    for round_ in range(rounds):
        await member.until(pb.ROUND, round_)
        await member.hand_in([1.0 + round_, 2.0], round_=round_)
    await member.until(pb.FINISHED, rounds - 1)
    await coordinator.stop()


def test_only_a_journal_with_a_session_can_be_extended(tmp_path):
    assert "there is no journal at" in refusal(extend(tmp_path, "+1"))
    assert "it must be +N" in refusal(extend(tmp_path, "some"), 2)
    assert "it must be +N" in refusal(extend(tmp_path, "0"), 2)


async def test_a_session_under_way_is_not_extended(start, tmp_path):
    coordinator = await start(rounds={"rounds": 7})
    await coordinator.stop()
    session = coordinator.driver.session.session_id
    told = refusal(extend(tmp_path, "+1"))
    assert re.search(f"{session} is not finished.* 0 of 7", told)


async def test_extended_sessions_count_rounds_and_epochs_on(enter, start, join, tmp_path):
    """Rounds begin at 0, epochs go on; a number without a plus is that of all rounds, over several
    extensions; optimiser's state and rules are those of the session that is extended."""
    settings = {"rounds": {"rounds": 2, "epochs": 3}, "aggregation": {"optimizer": "fedavgm"}}
    first = await start(**settings)
    await train(first, join(first, "a"), 2)
    assert "--rounds is '2', and 2 " in refusal(extend(tmp_path, "2"))
    assert extend(tmp_path, "3").exit_code == 0

    second = await start(**settings, resume=False)  # which refuses other rules
    session, old = second.driver.session, first.driver.session
    assert session.session_id != old.session_id
    assert session.rules.rounds == 1
    assert session.lineage.source == f"{old.session_id}/2"
    assert session.model.ref.digest == old.model.ref.digest
    assert session.model.state.keys() == {"momentum"}
    assert session.model.state["momentum"].digest == old.model.state["momentum"].digest
    [a] = await enter(second, "a", round_=0)
    assignment = await a.start()
    # The first round of the first session initialised, without an epoch.
    assert (assignment.epochs, assignment.epoch_base) == (3, 3)
    await a.hand_in([4.0, 4.0])
    await a.until(pb.FINISHED, 0)
    await second.stop()

    assert extend(tmp_path, "+2").exit_code == 0
    third = (await start(**settings, resume=False)).driver.session
    assert (third.lineage.num_rounds, third.lineage.num_epochs, third.rules.rounds) == (3, 6, 2)
    assert third.lineage.configured_rounds == 2


async def test_extended_session_starts_with_the_command_line_of_the_first(start, join, tmp_path):
    """--from-model names what the first session began with; any other model is refused."""
    np.save(tmp_path / "begun.npy", np.array([1.0, 2.0]))
    settings = {"rounds": {"rounds": 1}}
    line = {"resume": False, "from_model": str(tmp_path / "begun.npy"), **settings}
    first = await start(**line)
    await train(first, join(first, "a"), 1)
    before = first.driver.session.session_id
    for rounds in (1, 2):
        assert extend(tmp_path, "+1").exit_code == 0
        extended = await start(**line)
        lineage = extended.driver.session.lineage
        assert (lineage.source, lineage.num_rounds) == (f"{before}/1", rounds)
        before = extended.driver.session.session_id
        np.save(tmp_path / "other.npy", np.zeros(2, np.float32))
        with pytest.raises(CannotStart, match="--from-model = "):
            require_same_rules(
                extended.driver.session,
                config_for(tmp_path, **settings),
                str(tmp_path / "other.npy"),
            )
        await train(extended, join(extended, "a"), 1)


async def test_a_damaged_last_model_is_not_extended(start, join, tmp_path):
    """Nothing is written to the journal: the finished session is still the only one."""
    first = await start(rounds={"rounds": 1})
    await train(first, join(first, "a"), 1)
    (path,) = (tmp_path / "weights").glob("*/1/global.weights")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "are damaged" in refusal(extend(tmp_path, "+1"))
    path.unlink()
    assert "the weights store does not" in refusal(extend(tmp_path, "+1"))
    with closing(SqliteJournal(tmp_path / "journal.sqlite")) as journal:
        assert journal.check()[0] == 1
