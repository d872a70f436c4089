"""`xain-coordinator status` and its sisters against a real server on a free port."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from support import grpc_servers
from xain_coordinator.cli import main as cli
from xain_coordinator.inspection import client as inspection_client
from xain_wire.fl import coordinator_pb2, inspection_pb2, inspection_pb2_grpc


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of it than an operator has: the machine may have other things to do."""
    monkeypatch.setattr(
        inspection_client, "fetch", partial(inspection_client.fetch, timeout_s=60.0)
    )


class Inspection(inspection_pb2_grpc.InspectionServicer):
    """A coordinator in the middle of round 3."""

    def GetStatus(self, request: Any, context: Any) -> inspection_pb2.GetStatusResponse:
        return inspection_pb2.GetStatusResponse(
            session_id="5e55104",
            state=coordinator_pb2.ROUND,
            phase="collecting",
            round=3,
            num_rounds=10,
            num_trained=3,
            num_connected=2,
            num_required=2,
            num_selected=2,
            num_updates=1,
            waiting_for="1 of 2 updates: south.",
            session_seconds=3723,
            version="0.1.0",
            counters={"INVALID_UPDATE": 2, "lost_metrics": 0},
        )

    def ListParticipants(self, request: Any, context: Any) -> Any:
        profile = coordinator_pb2.DataProfile(num_samples=12000, num_features=4, classes=["a"])
        return inspection_pb2.ListParticipantsResponse(
            participants=[
                inspection_pb2.ParticipantStatus(
                    participant_id="north",
                    selected=True,
                    update_accepted=True,
                    lease_seconds=12.25,
                    reported_state=coordinator_pb2.READY,
                    profile=profile,
                    rounds_contributed=3,
                ),
                inspection_pb2.ParticipantStatus(
                    participant_id="[red]south\x1b[2J", selected=True, lease_seconds=-1
                ),
                inspection_pb2.ParticipantStatus(
                    participant_id="west",
                    selected=True,
                    transfer=coordinator_pb2.Transfer(
                        direction=coordinator_pb2.Transfer.UPLOAD, percent=43
                    ),
                ),
            ]
        )

    def ListRounds(self, request: Any, context: Any) -> inspection_pb2.ListRoundsResponse:
        rounds = [
            inspection_pb2.RoundStatus(
                round=n,
                phase="published",
                selected=["north", "south"],
                contributors=["north"],
                missing={"south": "deadline passed"},
                num_samples=2**40,
                seconds=1.5,
                num_selected=2,
                num_contributors=1,
            )
            for n in range(3)
        ]
        return inspection_pb2.ListRoundsResponse(rounds=rounds[-request.limit :])

    def ListModels(self, request: Any, context: Any) -> inspection_pb2.ListModelsResponse:
        ref = coordinator_pb2.WeightsRef(key="3/global", size_bytes=168, digest=b"\x01\xff")
        model = inspection_pb2.ModelStatus(
            round=3, ref=ref, dtype="float32", shape=[10], metadata={"workload": "sgd"}
        )
        return inspection_pb2.ListModelsResponse(models=[model])


def serve(servicer: inspection_pb2_grpc.InspectionServicer | None) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    if servicer is not None:
        inspection_pb2_grpc.add_InspectionServicer_to_server(servicer, server)
    with grpc_servers.serving(server) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def address() -> Iterator[str]:
    yield from serve(Inspection())


def run(*arguments: str) -> Result:
    # Wide and without colours, so that lines are whole wherever the test runs.
    environment = {"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, arguments, env=environment)


def test_status_for_people(address):
    """State, who takes part, what has been: all that an operator looks for at first."""
    result = run("status", "--address", address)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    for expected in (
        "collecting round 3, 3 of 10 rounds done",
        "1 of 2 updates: south.",
        "2 connected, 2 required",
        "5e55104, 1 h 2 min, version 0.1.0",
        "north handed in 12,000 3",
        "selected 0",
        "west uploading 43 % 0",
        "published 1/2 1,099,511,627,776 1.5 s south: deadline passed",
        "3/global, float32 10, 168 bytes",
        "INVALID_UPDATE 2",
    ):
        assert expected in told
    assert "lost_metrics" not in told  # a counter that is 0


class Divided(Inspection):
    """With tags, and one that is left out."""

    def ListParticipants(self, request: Any, context: Any) -> Any:
        status = inspection_pb2.ParticipantStatus
        return inspection_pb2.ListParticipantsResponse(
            participants=[
                status(participant_id="a", selected=True, tags={"ward": "7", "site": "north"}),
                status(participant_id="b", not_eligible_because="left out until round 5: why"),
                status(participant_id="d", tags={"site": "\x1b[2Jsouth"}),
            ]
        )


def test_status_shows_tags_and_participants_that_are_left_out():
    for divided in serve(Divided()):
        lines = run("status", "--address", divided).stdout.splitlines()
    told = [" ".join(line.split()) for line in lines]
    assert "site now samples rounds last problem tags" in told
    assert "a selected 0 site=north, ward=7" in told
    assert "b left out until round 5 0" in told
    assert "d waits 0 site=\ufffd[2Jsouth" in told


class Fleet(Inspection):
    """A fleet that comes in pages of 30, which is fewer than are asked for."""

    def GetStatus(self, request: Any, context: Any) -> inspection_pb2.GetStatusResponse:
        return inspection_pb2.GetStatusResponse(phase="standby", num_connected=100)

    def ListParticipants(self, request: Any, context: Any) -> Any:
        first = int(request.page_token or 0)
        last = min(first + min(request.page_size or 30, 30), 100)
        status = inspection_pb2.ParticipantStatus
        return inspection_pb2.ListParticipantsResponse(
            participants=[
                status(participant_id=f"site-{i:03}", not_eligible_because="it lacks site = north")
                for i in range(first, last)
            ],
            next_page_token=str(last) if last < 100 else "",
        )


def test_a_fleet_comes_in_pages():
    """People see the first one and how many there are; programs see all, with the reasons why they
    are not selected."""
    for fleet in serve(Fleet()):
        told = " ".join(run("status", "--address", fleet).stdout.split())
        everybody = json.loads(run("status", "--address", fleet, "--json").stdout)["participants"]
    assert "site-029 it lacks site = north" in told
    assert "site-030" not in told
    assert "and 70 more" in told
    assert [one["participant_id"] for one in everybody] == [f"site-{i:03}" for i in range(100)]
    assert {one["not_eligible_because"] for one in everybody} == {"it lacks site = north"}


def test_names_cannot_write_to_the_terminal(address):
    """Names come from the network: no escape sequences, and rich's markup is shown as it is."""
    told = run("status", "--address", address).stdout
    assert "[red]south\ufffd[2J" in told
    assert "\x1b" not in told


def test_status_as_json(address):
    """One object on one line, with everything; numbers are numbers, digests hex."""
    result = run("status", "--address", address, "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    told = json.loads(result.stdout)
    assert list(told) == ["status", "participants", "rounds", "models", "parameters"]
    assert told["parameters"] is None
    assert told["status"]["state"] == "ROUND"
    assert told["status"]["counters"] == {"INVALID_UPDATE": 2, "lost_metrics": 0}
    assert told["status"]["cause"] == ""
    assert told["participants"][0]["profile"] == {
        "num_samples": 12000,
        "num_features": 4,
        "classes": ["a"],
        "target": "",
        "task": "",
    }
    assert told["participants"][1]["profile"] is None
    transfers = [one["transfer"] for one in told["participants"]]
    assert transfers == [None, None, {"direction": "UPLOAD", "percent": 43}]
    assert [one["num_samples"] for one in told["rounds"]] == [2**40] * 3
    assert told["models"][0]["ref"] == {
        "key": "3/global",
        "size_bytes": 168,
        "digest": "01ff",
        "encoding": "PLAIN",
    }
    assert told["models"][0]["shape"] == [10]


def test_status_of_a_coordinator_that_is_away():
    """One line goes to standard error, and the exit status is 1."""
    result = run("status", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "nobody answers at 127.0.0.1:1: connection refused;" in result.stderr


def test_no_answer_in_time():
    """A coordinator that hangs does not hang its operator."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(inspection_client.NoStatus, match=f"{address} within 0.2 s"):
            inspection_client.fetch(address, timeout_s=0.2)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("ward.invalid", "ward.invalid:50051"),
        ("[::1]", "[::1]:50051"),
        ("::1", "[::1]:50051"),
        ("127.0.0.1:1", "127.0.0.1:1"),
    ],
)
def test_status_asks_at_the_port_that_participants_ask_at(monkeypatch, given, asked):
    """A host alone means port 50051, as in `xain-participant --coordinator`."""

    def refuse(address: str, **_: object) -> None:
        raise inspection_client.NoStatus(f"asked {address}")

    monkeypatch.setattr(inspection_client, "fetch", refuse)
    told = run("status", "--address", given, "--insecure").stderr
    assert told == f"xain-coordinator status: asked {asked}\n"
    told = run("report", "--address", given, "--insecure", "--html", "no.html").stderr
    assert told == f"xain-coordinator report: asked {asked}\n"


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("status", "--watch"),
        ("describe",),
        ("importance",),
        ("gains",),
        ("models",),
        ("export", "--to=a.npz"),
        ("predict", "--data=a.csv"),
        ("report", "--html=a.html"),
        ("study",),
    ],
)
def test_another_machine_is_not_asked_in_the_clear(words):
    """Unless that is meant: the answers have figures of the sites, and the rows of `predict`."""
    result = run(*words, "--address", "ward.invalid")
    assert result.exit_code == 2
    said = f"xain-coordinator {words[0]}: --address: 'ward.invalid' is another machine"
    assert result.stderr.startswith(said)
    assert "add --tls FOLDER, or --insecure" in result.stderr


INTERRUPTED = """
import contextlib, signal, sys
from xain_coordinator.inspection import client as inspection_client

signal.signal(signal.SIGALRM, signal.default_int_handler)
for number in range(20):
    with contextlib.suppress(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.001 * (number + 1))
        inspection_client.fetch(sys.argv[1])
print("ended")
"""


def test_ctrl_c_ends_the_question_at_any_moment():
    """A call of gRPC that a KeyboardInterrupt breaks off leaves no channel that never closes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", INTERRUPTED, address]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "ended\n", done.stderr
    assert done.returncode == 0


def test_check_config(tmp_path):
    """Every value with its origin, and the numbers that follow."""
    file = tmp_path / "fleet.toml"
    file.write_text("[rounds]\nmin_participants = 2\nfraction_participants = 0.5\n")
    result = run(
        "check-config", "--port=7", "-c", str(file), "--data-dir", "d", "--set", "rounds.seed=3"
    )
    assert result.exit_code == 0, result.output
    told = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "server.port 7 flag" in told
    assert "server.drain_s 10.0 default" in told
    assert "rounds.seed 3 flag" in told
    assert f"rounds.min_participants 2 {file}" in told
    assert 'rounds.fraction_participants "1/2" ' + str(file) in told
    assert 'journal.path "d/journal.sqlite" flag' in told
    assert "rounds.max_participants (not set) default" in told
    assert told[-3].startswith("A round needs N = 3 connected participants, of whom k = 2 are")
    assert told[-2].startswith("A model is made of the updates of all who are selected; 86400 s")
    assert told[-1].startswith("The rule weighted_average combines them.")
