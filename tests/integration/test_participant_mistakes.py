"""Mistakes at a site, over real processes: what the participant says, what the coordinator's log
and status say, and that the others go on."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.commands import status
from support.process import PATIENCE_S, CoordinatorProcess, Keep, Process
from xain_coordinator.inspection.client import fetch
from xain_foundation.exit_statuses import EXIT_NOTHING_COUNTED

SETTINGS: dict[str, object] = {
    "server.heartbeat_time_s": 0.4,
    "server.heartbeat_timeout_s": 1.6,
    "rounds.rounds": 4,
    "rounds.min_participants": 1,
    "rounds.start_participants": 2,
    "rounds.max_participants": 3,
}

SCRIPT = """
import sys, time
import numpy as np
from xain_participant import Participant, run

class Site(Participant):
    def init_weights(self):
        return np.zeros(3, np.float32)

    def train_round(self, weights, epochs, epoch_base):
        if {how!r} == "fails":
            raise ValueError("patient 4711 has no age")
        if {how!r} == "hangs":
            time.sleep(3600)  # longer than the test lasts
        time.sleep(0.05)  # a round takes some time
        if {how!r} == "diverges":
            return weights * np.float32("nan"), 10
        return weights + 1, 10

sys.exit(run(Site(), {target!r}, {name!r}))
"""


class Site(Process):
    """A participant of a script of its own."""

    def __init__(
        self, folder: Path, target: str, name: str, how: str = "trains", *, log: str = ""
    ) -> None:
        super().__init__(folder, log or name)
        text = SCRIPT.format(how=how, target=target, name=name)
        self._command = ["-c", "import logging; logging.basicConfig(level=20)\n" + text]

    async def start(self) -> None:
        self._process = await self.run(self._command)


class Csv(Process):
    """xain-participant with a table of its own. table: its lines, the target last."""

    def __init__(self, folder: Path, target: str, name: str, table: str, *flags: str) -> None:
        super().__init__(folder, name)
        data = folder / f"{name}.csv"
        data.write_text(table)
        self._command = ["-m", "xain_participant", "--coordinator", target, "--data", str(data)]
        self._command += ["--id", name, *flags]

    async def start(self) -> None:
        self._process = await self.run(self._command)


class CsvWithoutTorch(Csv):
    """A table's participant in an environment in which PyTorch is not installed."""

    async def start(self) -> None:
        program = (
            "import sys; sys.modules['torch'] = None\n"
            "from xain_participant.cli.cli import main\nsys.exit(main())"
        )
        self._process = await self.run(["-c", program, *self._command[2:]])


Begin = Callable[..., Awaitable[CoordinatorProcess]]
Run = Callable[[Process], Awaitable[Process]]


@pytest.fixture
def begin(keep: Keep, tmp_path: Path) -> Begin:
    async def start(**settings: object) -> CoordinatorProcess:
        named = {key.replace("__", "."): value for key, value in settings.items()}
        coordinator = keep(CoordinatorProcess(tmp_path, {**SETTINGS, **named}))
        await coordinator.start()
        return coordinator

    return start


@pytest.fixture
def launch(keep: Keep) -> Run:
    async def start(process: Process) -> Process:
        await keep(process).start()
        return process

    return start


def target_of(coordinator: CoordinatorProcess) -> str:
    return f"127.0.0.1:{coordinator.port}"


# --- two processes with one id ---


async def test_second_process_with_an_id_is_refused_and_both_are_told(begin, launch, tmp_path):
    coordinator = await begin()
    target = target_of(coordinator)
    first = await launch(Site(tmp_path, target, "ward"))
    await first.until_logged("joined")
    second = await launch(Site(tmp_path, target, "ward", log="second"))
    assert await second.died() == 1
    assert "is connected as ward" in second.log()
    assert "participant id of its own" in second.log()
    await first.until_logged("wants to join as ward")
    await coordinator.until_logged("participant_id_in_use")
    snapshot = fetch(target)
    (warning,) = snapshot.status.warnings
    assert "Two processes have the participant id ward" in warning
    assert "a second process with this id" in snapshot.participants.participants[0].conflict
    await launch(Site(tmp_path, target, "other"))
    assert await first.died() == 0, "it was not disturbed"


async def test_process_with_the_state_directory_of_a_killed_one_takes_over_at_once(
    begin, launch, tmp_path
):
    coordinator = await begin(server__heartbeat_timeout_s=600)
    target = target_of(coordinator)
    table = "a,b,y\n1,2,0\n2,1,1\n"
    flags = ("--state-dir", str(tmp_path / "state"))
    first = await launch(Csv(tmp_path, target, "ward", table, *flags))
    await first.until_logged("joined")
    await first.kill()
    first.log_path.unlink()
    again = await launch(Csv(tmp_path, target, "ward", table, *flags))
    await again.until_logged("joined")
    assert coordinator.events("participant_left") == []


# --- failures ---


async def test_failure_of_a_participant_reaches_log_record_and_status(begin, launch, tmp_path):
    """The exception's message, which quotes the data, does not leave the participant."""
    coordinator = await begin(rounds__initial_weights="average")
    target = target_of(coordinator)
    good = await launch(Site(tmp_path, target, "good"))
    bad = await launch(Site(tmp_path, target, "bad", "fails"))
    assert await bad.died() == 1
    assert "patient 4711 has no age" in bad.log()
    await coordinator.until_logged("training_failed")
    (line,) = coordinator.events("training_failed")
    assert (line["participant"], line["reason"]) == ("bad", "ValueError")
    assert "in train_round" in str(line["traceback"])
    assert "4711" not in coordinator.log()
    assert await good.died() == 0
    snapshot = fetch(target, everything=True)
    rounds = {one.round: one for one in snapshot.rounds.rounds}
    number = int(str(line["round"]))
    assert list(rounds[number].selected).count("bad") == 1
    assert dict(rounds[number].missing) == {"bad": "failed: ValueError"}
    accounts = {one.participant_id: one for one in snapshot.status.sites}
    assert accounts["good"].rounds_contributed == 3
    assert accounts["bad"].rounds_contributed == 0, "initial weights are not trained"
    assert coordinator.events("participation") != []


async def test_refused_updates_reach_the_participant_the_record_log_and_status(
    begin, launch, tmp_path
):
    """After two in a row its sender is left out, and at the end all are told that it never
    counted."""
    coordinator = await begin(
        rounds__initial_weights="first",
        rounds__refused_limit=2,
        rounds__refused_rounds=100,
        server__heartbeat_timeout_s=600,
    )
    target = target_of(coordinator)
    good = await launch(Site(tmp_path, target, "good"))
    bad = await launch(Site(tmp_path, target, "bad", "diverges"))
    assert await good.died() == 0, good.log()
    assert await bad.died() == EXIT_NOTHING_COUNTED, bad.log()
    why = "the weights are not finite, first at index 0; train with a smaller learning rate"
    assert bad.log().count(f"update_invalid participant='bad' round=1 reason='{why}'") == 2
    refused = coordinator.events("update_refused")
    assert [one["participant"] for one in refused] == ["bad", "bad"]
    assert {one["reason"] for one in refused} == {why}
    assert [one["participant"] for one in coordinator.events("participant_left_out")] == ["bad"]
    snapshot = fetch(target, everything=True)
    _, record, *later = snapshot.rounds.rounds
    assert sorted(record.selected) == ["bad", "good"]
    assert list(record.contributors) == ["good"]
    assert dict(record.missing) == {"bad": f"refused: {why}"}
    assert [list(one.selected) for one in later] == [["good"]] * 3
    # The same at the end, in the log and on the operator's screen.
    assert coordinator.events("participation")[0]["rounds_contributed"] == {"good": 4}
    assert coordinator.events("participants_never_counted")[0]["participant"] == ["bad"]
    assert list(snapshot.status.warnings) == [
        "bad has never counted; it was selected for 1 round: left out until round 102.",
        "50% of the samples were lost in the latest rounds; rounds.max_lost_share is 20%.",
        f"An update of bad was refused: {why} (2 times, the last in round 1).",
    ]
    told = " ".join((await status(coordinator.port)).split())
    assert "bad has never counted" in told
    assert "the weights are not finite" in told


# --- participants that hang ---


async def test_participant_that_hangs_is_left_out_and_warned_of(begin, launch, tmp_path):
    coordinator = await begin(
        rounds__rounds=7,
        rounds__deadline_s=1.0,
        rounds__refused_limit=2,
        rounds__refused_rounds=3,
        rounds__initial_weights="average",
    )
    target = target_of(coordinator)
    good = await launch(Site(tmp_path, target, "good"))
    await launch(Site(tmp_path, target, "slow", "hangs"))
    await coordinator.until_logged("participant_left_out")
    assert await good.died() == 0
    await coordinator.until_logged("participant_not_counted")
    await coordinator.until_logged("samples_lost")
    snapshot = fetch(target, everything=True)
    reasons = [one.missing["slow"] for one in snapshot.rounds.rounds if "slow" in one.selected]
    assert set(reasons) <= {"", "deadline passed"}
    left_out = [one.round for one in snapshot.rounds.rounds if "slow" not in one.selected]
    assert left_out == [3, 4, 5], "after two deadlines, for three rounds"
    # Its initial weights were averaged with those of the other one; training they are none.
    (warning,) = (one for one in snapshot.status.warnings if one.startswith("slow "))
    assert warning.startswith("slow has never counted")
    assert coordinator.events("session_finished")[0]["cause"] == "completed"


# --- data that do not fit ---


CLASSES = "a,b,y\n1,2,no\n2,1,yes\n3,1,yes\n1,3,no\n"
NUMBERS = "a,b,y\n1,2,0.5\n2,1,1.25\n3,1,7.5\n1,3,2.75\n"
KG = "--set=data.units.a=kg"
# For each site its table, its flags, and what both ends are told. Unit tests have every mistake.
MISFITS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "regression": (NUMBERS, ("--task=regression",), "the data are for regression, the session for"),
    "renamed": (
        CLASSES.replace("b,y", "B_cm,y"),
        (),
        "column 'b' of the session's schema is not in the data, and column 'B_cm' of the data is"
        " not in the schema; if two of them are the same, rename it, set data.rename",
    ),
    "pounds": (
        CLASSES,
        ("--set=data.units.a=lb",),
        "column 'a' is in the unit 'lb', in the session's schema in 'kg'",
    ),
    "outcome": (CLASSES.replace(",y", ",z"), (KG,), "the target is called 'z', in the session 'y'"),
    "stray": (f"{CLASSES}2,2,unknown\n", (), "label 'unknown' of the target 'y' is unknown to the"),
}


async def test_data_that_do_not_fit_are_refused_at_both_sides(begin, launch, tmp_path):
    """The first participant's data are the schema."""
    coordinator = await begin(workload__name="sgd")
    target = target_of(coordinator)
    first = await launch(Csv(tmp_path, target, "first", CLASSES, KG))
    await first.until_logged("joined")
    for name, (table, flags, complaint) in MISFITS.items():
        site = await launch(Csv(tmp_path, target, name, table, *flags))
        assert await site.died() == 1
        assert complaint in json.loads(site.log().splitlines()[-1])["reason"]
        assert "left_without_goodbye" not in site.log(), "it has never joined"
    told = coordinator.events("rendezvous_refused")
    assert [line["participant"] for line in told] == list(MISFITS)
    for line, (name, (*_, complaint)) in zip(told, MISFITS.items(), strict=True):
        assert (line["level"], line["code"]) == ("warning", "PROFILE_MISMATCH")
        assert complaint in str(line["reason"])
        assert name in str(line["reason"])
    named = [one.partition(" was not let in: ")[0] for one in fetch(target).status.warnings]
    assert sorted(named) == sorted(map(repr, MISFITS))


# --- a coordinator without a workload ---


async def test_table_for_a_coordinator_without_a_workload_is_told_at_both_sides(
    begin, launch, tmp_path
):
    """With the flag that is missing, and without a traceback."""
    coordinator = await begin(rounds__start_participants=1)
    site = await launch(Csv(tmp_path, target_of(coordinator), "site", CLASSES))
    assert await site.died() == 1
    assert "add --workload sgd to its start" in site.log()
    assert "Traceback" not in site.log()
    await coordinator.until_logged("training_failed")
    assert "add --workload sgd to its start" in coordinator.events("training_failed")[0]["reason"]


# --- packages that are missing ---


async def test_package_that_is_not_installed_is_named(begin, launch, tmp_path):
    coordinator = await begin(
        rounds__start_participants=1,
        workload__name="neural",
        workload__options__layers='[{type = "linear"}]',
    )
    header, _, rows = CLASSES.partition("\n")
    text = f"{header}\n{rows * 3}"  # enough of them to be scaled
    site = await launch(CsvWithoutTorch(tmp_path, target_of(coordinator), "site", text))
    assert await site.died() == 1
    assert "pip install torch" in site.log()
    await coordinator.until_logged("training_failed")


pytestmark = pytest.mark.timeout(4 * PATIENCE_S)
