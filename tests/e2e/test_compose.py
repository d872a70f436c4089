"""The compose stack: that its parts fit together, and, on a real Docker engine, that it trains to
the end while parts of it die."""

import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.parse
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import numpy as np
import pytest
import yaml
from botocore.exceptions import ClientError

from support.command_lines import parsed
from support.containers import engine, time_series
from support.containers.engine import docker, wait_until
from support.containers.stack import Stack
from support.process import ran
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.exit_statuses import FINAL
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_foundation.settings.settings import load as load_settings
from xain_participant.config import ParticipantConfig
from xain_workloads import workload
from xain_workloads.model import Model, TensorSpec
from xain_workloads.tables.data import load
from xain_workloads.tables.reading.dialect import Dialect

COMPOSE = yaml.safe_load((engine.ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
PROFILES = ("gradient", "bagging", "neural")
COORDINATORS = ("coordinator", *(f"coordinator-{kind}" for kind in PROFILES))
PARTICIPANTS = ("participant", *(f"participant-{kind}" for kind in PROFILES))
SPARSE = ("parameter-scheduler", "parameter-server", "sparse-data", "sparse-worker")
OURS = ("setup", *COORDINATORS, *PARTICIPANTS, *SPARSE)
FILES = engine.ROOT / "deploy/compose"
NUM_PARTICIPANTS = 4
ROUNDS = 10


def test_ports_are_local():
    """Nothing of the stack can be reached from another machine."""
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 4 + len(PROFILES)
    assert len(set(ports)) == len(ports)
    assert all(port.startswith("127.0.0.1:${") for port in ports)


def test_images_are_pinned():
    """The image of tomorrow is the one that was tested; ours have the version of the tree."""
    for name, service in SERVICES.items():
        tag = service["image"].partition(":")[2]
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?", tag), service["image"]
        if name in OURS:
            part = "participant" if name in (*PARTICIPANTS, *SPARSE) else "coordinator"
            project = (engine.ROOT / part / "pyproject.toml").read_text(encoding="utf-8")
            assert tag == tomllib.loads(project)["project"]["version"]


def test_secrets_come_from_files():
    """No service is given one in its environment, and each has a volume of its own, read-only."""
    for name, service in SERVICES.items():
        for key in service.get("environment", {}):
            if re.search("PASSWORD|TOKEN|SECRET|ACCESS_KEY", key):
                assert key.endswith("_FILE"), f"{name}: {key}"
        mounted = [volume for volume in service.get("volumes", ()) if "-secrets:" in volume]
        if name != "setup":
            owner = "coordinator" if name in COORDINATORS else name
            owner = {"sparse-worker": "worker"}.get(owner, owner)
            owner = "parameter" if owner.startswith("parameter-") else owner
            has_none = name in (*PARTICIPANTS, "sparse-data")
            expected = [] if has_none else [f"{owner}-secrets:/run/secrets/xain:ro"]
            assert mounted == expected


@pytest.mark.parametrize("name", OURS)
def test_ours_are_locked_up(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", COORDINATORS)
def test_settings_can_be_loaded(name):
    """The files that are mounted go through our own checks, and suit the stack."""
    coordinator = load_settings(CoordinatorConfig, FILES / f"{name}.toml")
    participant = load_settings(ParticipantConfig, FILES / "participant.toml")
    assert participant.coordinator.host in SERVICES
    assert coordinator.storage.endpoint == "https://s3:8333"
    assert coordinator.metrics.url == "https://influxdb:8086"
    assert coordinator.in_the_clear == ()
    influxdb = SERVICES["influxdb"]["environment"]
    assert coordinator.metrics.org == influxdb["DOCKER_INFLUXDB_INIT_ORG"]
    assert coordinator.metrics.bucket == influxdb["DOCKER_INFLUXDB_INIT_BUCKET"]
    service = SERVICES[name.replace("coordinator", "participant")]
    assert name in service["depends_on"]
    host = service["environment"].get("XAIN_PARTICIPANT_COORDINATOR__HOST")
    assert (host or participant.coordinator.host) == name
    assert host is None or host in COMPOSE["x-here"].split(",")
    replicas = service["deploy"]["replicas"]
    assert replicas == coordinator.rounds.effective_start_participants == NUM_PARTICIPANTS
    # Changed settings must not keep it from serving: it would be started again for ever.
    assert "--resume" in SERVICES[name]["command"]
    # Another 8 s at most for what comes after the drain.
    grace_s = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= coordinator.server.drain_s + 8


@pytest.mark.parametrize("name", COORDINATORS)
def test_coordinators_are_closed(name):
    """Each makes its certificate, for the name that its participants connect to, where it looks for
    it, and a token for each of their slices, which they alone may read."""
    settings = load_settings(CoordinatorConfig, FILES / f"{name}.toml")
    assert not settings.server.insecure
    enrol = runpy.run_path(str(FILES / "enrol.py"))
    assert settings.access_folder == enrol["ACCESS"]
    service, participant = SERVICES[name], SERVICES[name.replace("coordinator", "participant")]
    assert service["entrypoint"] == ["python", "/etc/xain/enrol.py", name, "xain-coordinator"]
    (tokens,) = (v for v in service["volumes"] if v.endswith(f":{enrol['TOKENS']}"))
    assert f"{tokens}:ro" in participant["volumes"]
    assert runpy.run_path(str(FILES / "claim_slice.py"))["TOKENS"] == enrol["TOKENS"]
    parts = participant["environment"]["XAIN_PARTICIPANT_PARTITION__NUM_PARTS"]
    assert service["environment"]["SLICES"] == parts == SERVICES["setup"]["environment"]["SLICES"]
    for user in SERVICES.values():
        if user not in (service, participant, SERVICES["setup"]):
            assert not [
                v for v in user.get("volumes", ()) if v.startswith(tokens.split(":")[0] + ":")
            ]


def test_setup_makes_certificates_for_the_names_of_services(tmp_path, monkeypatch):
    """Also for this machine, which reaches the stores by published ports; those of the parameter
    server are made anew with more workers. What is there stays."""
    setup = runpy.run_path(str(FILES / "setup.py"))["main"]
    monkeypatch.setitem(setup.__globals__, "ROOT", tmp_path)
    for volume in SERVICES["setup"]["volumes"]:
        (tmp_path / volume.rpartition("/")[2]).mkdir()
    for slices in ("1", "2"):
        monkeypatch.setenv("SLICES", slices)
        setup()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    setup()
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    settings = load_settings(CoordinatorConfig, FILES / "coordinator.toml")
    assert settings.storage.ca_file == settings.metrics.ca_file == Path("/run/authority/ca.crt")
    authority = ssl.create_default_context(cafile=tmp_path / "authority/ca.crt")
    for url in (settings.storage.endpoint, settings.metrics.url):
        host = urllib.parse.urlsplit(url).hostname
        own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        own.load_cert_chain(tmp_path / host / "tls/public.crt", tmp_path / host / "tls/private.key")
        for name in (host, "localhost", "127.0.0.1"):
            shake_hands(authority, own, name)
    names = {
        folder: Certificates(tmp_path / folder).identity
        for folder in ("parameters", "workers/worker-0", "workers/worker-1")
    }
    assert [(one.role, one.name) for one in names.values()] == [
        (Role.COORDINATOR, "parameters"),
        (Role.PARTICIPANT, "worker-0"),
        (Role.PARTICIPANT, "worker-1"),
    ]


def shake_hands(client, server, name):
    """A handshake of TLS in memory. Raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(down, up, server_hostname=name)
    answering = server.wrap_bio(up, down, server_side=True)
    for side in (asking, answering, asking):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    answering.do_handshake()


def test_tokens_are_made_anew_before_their_time_is_over(tmp_path):
    """At a start after half of it, where one is missing, or with a new authority; the certificate
    is made once."""
    access, tokens, told = tmp_path / "access", tmp_path / "tokens", tmp_path / "told"
    code = (
        f"import sys; sys.path.insert(0, {str(FILES)!r}); import enrol, pathlib; "
        f"enrol.ACCESS = pathlib.Path({str(access)!r}); "
        f"enrol.TOKENS = pathlib.Path({str(tokens)!r}); enrol.main()"
    )
    program = tmp_path / "program"
    program.write_text(
        f'#!/bin/sh\necho "$1 $2" >> {told}\n'
        f'case "$1" in certs) mkdir -p {access}/tls; touch {access}/ca.crt;; '
        f"tokens) mkdir -p {tokens}; touch {tokens}/slice-0.token {tokens}/slice-1.token;; esac\n"
    )
    program.chmod(0o755)

    def start():
        told.write_text("")
        command = [sys.executable, "-c", code, "coordinator", str(program), "--resume"]
        subprocess.run(command, check=True, env={**os.environ, "SLICES": "2"}, timeout=60)
        return told.read_text().splitlines()

    assert start() == ["certs init", "tokens create", "--resume "]
    assert start() == ["--resume "]
    (tokens / "slice-1.token").unlink()
    assert start() == ["tokens create", "--resume "]
    os.utime(tokens / "slice-0.token", (0, 0))
    assert start() == ["tokens create", "--resume "]
    os.utime(tokens / "slice-0.token", (time.time() - 60, time.time() - 60))
    shutil.rmtree(access)
    assert start() == ["certs init", "tokens create", "--resume "]


@pytest.mark.parametrize(("joins", "status"), [(True, 9), (False, 1)])
def test_replica_joins_with_the_token_of_its_slice(tmp_path, joins, status):
    """And takes part with the certificate that it has got, or not at all."""
    for name in ("slices", "tokens"):
        (tmp_path / name).mkdir()
    (tmp_path / "slices/0").touch()
    program = tmp_path / "program"
    program.write_text(
        f'#!/bin/sh\necho "$* $XAIN_PARTICIPANT_TLS__FOLDER"\n'
        f'[ "$1" = join ] && exit {0 if joins else 1}\nexit 9\n'
    )
    program.chmod(0o755)
    tokens, state = tmp_path / "tokens", tmp_path / "state"
    code = claiming(tmp_path / "slices").replace(
        "claim_slice.main()",
        f"claim_slice.TOKENS = pathlib.Path({str(tokens)!r}); "
        f"claim_slice.STATE = pathlib.Path({str(state)!r}); claim_slice.main()",
    )
    done = ran("-c", code, program, "--config=x", XAIN_PARTICIPANT_PARTITION__NUM_PARTS="1")
    expected = [f"join {tokens}/slice-0.token --state-dir={state} ", f"--config=x {state}/tls"]
    assert done.stdout.splitlines() == expected[: 2 if joins else 1]
    assert done.returncode == status


@pytest.mark.parametrize("kind", PROFILES)
def test_profile_trains_with_its_own_parts(kind):
    """Nothing that a profile adds is started without it, and it shares no journal and no slices."""
    coordinator, participant = SERVICES[f"coordinator-{kind}"], SERVICES[f"participant-{kind}"]
    assert coordinator["profiles"] == participant["profiles"] == [kind]
    assert participant["image"].partition(":")[0].endswith(participant["build"]["target"])
    mounted = [v.partition(":")[0] for one in (coordinator, participant) for v in one["volumes"]]
    own = {f"coordinator-{kind}-data", f"slices-{kind}", f"tokens-{kind}"}
    assert set(mounted) == {"authority", "coordinator-secrets", *own}
    for what in ("slices", "tokens"):
        assert f"{what}-{kind}:/run/setup/{what}-{kind}" in SERVICES["setup"]["volumes"]
    config, _ = coordinator["configs"]
    assert COMPOSE["configs"][config["source"]]["file"] == f"deploy/compose/coordinator-{kind}.toml"


def test_sparse_profile_fits_together():
    """Addresses, folders and numbers in the commands are those of the services beside them."""
    values = {}
    for name in SPARSE:
        service = SERVICES[name]
        assert service["profiles"] == ["sparse"]
        assert service["image"].partition(":")[0].endswith(service["build"]["target"])
        command = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]]
        values[name] = parsed(service["entrypoint"][-1], command)
    scheduler, server, data, worker = (values[name] for name in SPARSE)
    port = scheduler["listen"].rpartition(":")[2]
    assert server["scheduler"] == worker["server"] == f"parameter-scheduler:{port}"
    assert "parameter-scheduler" in COMPOSE["x-here"].split(",")
    check = SERVICES["parameter-server"]["healthcheck"]["test"][-1]
    assert server["listen"].rpartition(":")[2] in check
    for name in ("parameter-scheduler", "parameter-server"):
        assert f"parameter-checkpoints:{scheduler['checkpoints']}" in SERVICES[name]["volumes"]
    folder = data["folder"]
    assert f"sparse-rows:{folder}" in SERVICES["sparse-data"]["volumes"]
    assert f"sparse-rows:{folder}:ro" in SERVICES["sparse-worker"]["volumes"]
    assert (worker["data"], worker["test"]) == (f"{folder}/train", f"{folder}/test")
    num_parts = SERVICES["sparse-worker"]["environment"]["XAIN_PARTICIPANT_PARTITION__NUM_PARTS"]
    assert SERVICES["sparse-worker"]["deploy"]["replicas"] == num_parts
    assert SERVICES["sparse-worker"]["depends_on"].keys() == {"parameter-server", "sparse-data"}
    assert scheduler["insecure"] is server["insecure"] is False


def test_dashboard_asks_for_written_fields_only():
    """Every field that a panel asks for is one that the coordinator or the workload writes."""
    file = FILES / "grafana/dashboards/training.json"
    dashboard = json.loads(file.read_text(encoding="utf-8"))
    source = yaml.safe_load(
        (FILES / "grafana/provisioning/datasources/influxdb.yaml").read_text(encoding="utf-8")
    )["datasources"][0]
    asked = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == source["uid"]
        for target in panel["targets"]:
            (measurement,) = re.findall(r'_measurement == "(\w+)"', target["query"])
            fields = re.findall(r'_field == "(\w+)"', target["query"])
            assert fields, panel["title"]
            assert 'r.session == "${session}"' in target["query"], panel["title"]
            asked |= {(measurement, field) for field in fields}
    coordinator = {"state", "round", "connected", "selected", "round_seconds", "num_updates"}
    coordinator.add("number_of_selected_participants")
    coordinator |= {"update_bytes", "aggregation_seconds"}
    participant = {"accuracy", "loss", "test_accuracy", "test_loss", "samples", "seconds"}
    written = {("coordinator", field) for field in coordinator}
    written |= {("participant", field) for field in participant}
    written |= {("evaluation", field) for field in ("accuracy", "loss")}
    assert asked <= written
    assert {measurement for measurement, _ in asked} == {"coordinator", "evaluation", "participant"}
    assert len(asked) > 8
    (variable,) = dashboard["templating"]["list"]
    assert variable["name"] == "session"
    assert variable["query"]["query"] == variable["definition"]


def pinned(file):
    """Each requirement of a lock, with its hashes."""
    return set(re.split(r"\n(?! )", (engine.ROOT / file).read_text(encoding="utf-8").strip()))


def test_images_install_the_tested_versions():
    """The locks of the images are parts of the one that everything else is installed from: run
    `make lock` if they are not."""
    everything = pinned("locks/requirements.lock")
    for part in (
        "build",
        "coordinator",
        "participant",
        "participant-bagging",
        "participant-sparse",
    ):
        lock = pinned(f"locks/requirements-{part}.lock")
        assert len(lock) > 5
        assert lock <= everything


def claiming(slices):
    """Code that runs deploy/compose/claim_slice.py with this folder of slices."""
    folder = engine.ROOT / "deploy/compose"
    return (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import claim_slice, pathlib; "
        f"claim_slice.SLICES = pathlib.Path({str(slices)!r}); claim_slice.main()"
    )


def test_replica_has_name_of_its_slice_and_instance_of_its_container(tmp_path):
    """A container that is restarted after a kill is the same instance."""
    for index in range(2):
        (tmp_path / str(index)).touch()
    done = ran("-c", claiming(tmp_path), "env", XAIN_PARTICIPANT_PARTITION__NUM_PARTS="2")
    assert done.returncode == 0, done.stderr
    given = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert given["XAIN_PARTICIPANT_PARTICIPANT__ID"] == "slice-0"
    assert given["XAIN_PARTICIPANT_PARTICIPANT__INSTANCE_ID"] == socket.gethostname()


@pytest.mark.parametrize(("command", "status"), [("exit 5", 0), ("exit 1", 1), ("kill -9 $$", 137)])
def test_replica_that_ends_with_a_final_status_is_not_started_again(tmp_path, command, status):
    """Compose starts a container again after any status but 0."""
    (tmp_path / "0").touch()
    words = ("-c", claiming(tmp_path), "sh", "-c", command)
    done = ran(*words, XAIN_PARTICIPANT_PARTITION__NUM_PARTS="1")
    assert done.returncode == status
    assert ("status 5 is final" in done.stderr) == (command == "exit 5")


def test_signal_reaches_the_program_of_a_replica(tmp_path):
    """Docker sends SIGTERM to the first process of a container, and the participant takes leave."""
    (tmp_path / "0").touch()
    command = 'trap "exit 143" TERM; echo ready; while :; do sleep 0.1; done'
    with subprocess.Popen(
        [sys.executable, "-c", claiming(tmp_path), "sh", "-c", command],
        env={**os.environ, "XAIN_PARTICIPANT_PARTITION__NUM_PARTS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as replica:
        assert replica.stdout.readline() == "ready\n"
        replica.terminate()
        assert replica.wait(60) == 143


def test_slices_know_the_final_statuses():
    """The script has a copy of them, since it runs where our packages need not be."""
    code = (engine.ROOT / "deploy/compose/claim_slice.py").read_text(encoding="utf-8")
    assert f"\nFINAL = {FINAL} " in code


# --- on a real engine -----------------------------------------------------------------------------


@pytest.fixture
def stack():
    images = tuple(SERVICES[name]["image"] for name in ("s3", "influxdb"))
    engine.require(images=(engine.BASE, *images), compose=True)
    engine.build()
    with ended(Stack(ROUNDS)) as mine:
        yield mine


@pytest.fixture
def sparse_stack():
    engine.require(compose=True)
    engine.build(engine.SPARSE, engine.COORDINATOR)
    with ended(Stack(ROUNDS, "sparse")) as mine:
        yield mine


@contextmanager
def ended(mine):
    try:
        yield mine
    finally:
        mine.end()
        project = f"label=com.docker.compose.project={mine.project}"
        for kind in ("ps --all", "volume ls", "network ls"):
            assert docker(*kind.split(), "--quiet", "--filter", project) == ""


@pytest.mark.timeout(2700)
def test_a_training_survives_its_parts(stack, tmp_path):
    """From nothing to FINISHED, while in the middle of a round the coordinator, a participant and
    the store are killed: it is one session, nobody trains twice what was acknowledged, the model is
    in the bucket, and the metrics of every round are in the time series."""
    participants = freeze_in_the_first_round(stack)
    session = stack.status().status.session_id
    ids = names(stack)
    assert len(ids) == NUM_PARTICIPANTS

    coordinator = stack.container("coordinator")
    docker("kill", coordinator)
    docker("start", coordinator)
    wait_until("the coordinator is back", lambda: stack.status() is not None)
    assert where(stack) == (session, "collecting", 0, NUM_PARTICIPANTS - 1)

    killed = participants[1]
    send(killed, signal.SIGKILL)
    wait_until("it is restarted", lambda: engine.inspect(killed)["RestartCount"] == 1)
    wait_until("and has joined", lambda: engine.logs(killed).count('"joined"') == 2)
    assert where(stack) == (session, "collecting", 0, NUM_PARTICIPANTS - 1)
    assert names(stack) == ids

    store = stack.container("s3")
    docker("kill", store)
    send(participants[0], signal.SIGCONT)
    wait_until("the round needs the store", lambda: needs_store(stack, participants[0]))
    here = where(stack)
    assert (here[0], here[2]) == (session, 0)
    docker("start", store)

    wait_until("the session is over", lambda: where(stack)[1] == "finished", 300)
    assert where(stack)[0] == session
    assert stack.status().status.cause == "completed"
    for participant in participants:
        assert docker("wait", participant) == "0", engine.logs(participant)
    trained = [line for line in map(json_of, engine.logs(killed).splitlines()) if line]
    assert [line["round"] for line in trained if line["event"] == "trained"] == list(range(ROUNDS))

    authority = str(tmp_path / "ca.crt")
    stack.compose("cp", "coordinator:/run/authority/ca.crt", authority)
    check_model(stack, session, authority)
    check_take_home(stack, tmp_path / "home")
    check_metrics(stack, ids, authority)
    check_secrecy(stack)


@pytest.mark.timeout(2700)
def test_sparse_profile_trains_while_a_server_dies(sparse_stack):
    """The profile needs no coordinator and no stores. The model is written from a checkpoint."""
    stack = sparse_stack
    # All workers wait for one that is not started yet.
    stack.compose("up", "--detach", "--scale=sparse-worker=3", "sparse-worker", timeout=300)
    running = stack.compose("ps", "--services").split()
    assert set(running) == {"parameter-scheduler", "parameter-server", "sparse-worker"}
    first, second = stack.containers("parameter-server")

    def waiting():
        return sum(
            '"server_connected"' in engine.logs(one) for one in stack.containers("sparse-worker")
        )

    wait_until("three workers are there", lambda: waiting() == 3)
    docker("kill", first)
    stack.compose("up", "--detach", "--no-deps", "--no-recreate", "sparse-worker")
    workers = stack.containers("sparse-worker")
    assert len(workers) == 4
    for worker in workers:
        assert docker("wait", worker) == "0", engine.logs(worker)
    scores = re.findall(r"AUC (0[.]\d+)", "".join(map(engine.logs, workers)))
    assert [float(score) > 0.8 for score in scores] == [True]

    scheduler = stack.container("parameter-scheduler")
    assert "parameters: " in docker("exec", scheduler, "xain-parameter-server", "status")
    docker("exec", scheduler, "xain-parameter-server", "checkpoint")
    export = (
        'xain-parameter-server export "$(ls -dv /var/lib/checkpoints/cut-* | tail -n 1)" '
        "--table logistic --to /var/lib/checkpoints/model.npz"
    )
    docker("exec", scheduler, "sh", "-c", export)
    size = docker("exec", scheduler, "stat", "--format=%s", "/var/lib/checkpoints/model.npz")
    assert int(size) > 10_000
    assert "rolled_back" not in engine.logs(scheduler)
    assert engine.inspect(second)["State"]["Running"]


def freeze_in_the_first_round(stack):
    """The containers of the participants. All have handed in but the first, which is stopped: the
    round stands still for as long as we like."""
    stack.compose("up", "--detach", f"--scale=participant={NUM_PARTICIPANTS - 1}", timeout=300)
    wait_until("all but one have joined", lambda: connected(stack) == NUM_PARTICIPANTS - 1, 300)
    before = set(stack.containers("participant"))
    first, second, third = before
    send(first, signal.SIGSTOP)
    stack.compose("up", "--detach", "--no-recreate", f"--scale=participant={NUM_PARTICIPANTS}")
    (last,) = set(stack.containers("participant")) - before
    wait_until(
        "all but one have handed in",
        lambda: stack.status().status.num_updates == NUM_PARTICIPANTS - 1,
        300,
    )
    return [first, second, third, last]


def connected(stack):
    snapshot = stack.status()
    return snapshot.status.num_connected if snapshot is not None else 0


def where(stack):
    """(session, phase, round, updates of the round)"""
    snapshot = stack.status()
    assert snapshot is not None, stack.logs()
    status = snapshot.status
    return status.session_id, status.phase, status.round, status.num_updates


def names(stack):
    return sorted(p.participant_id for p in stack.status().participants.participants)


def needs_store(stack, last):
    """Whether the round cannot go on without the store. The update of a last participant that has
    heard of the round goes to the journal, and then the coordinator cannot make the model of the
    round. One that has not heard of the round is refused its model."""
    snapshot = stack.status()
    assert snapshot is not None, stack.logs()
    _, is_aggregating, trouble = snapshot.status.waiting_for.partition("being aggregated.")
    if is_aggregating:
        return trouble != ""
    entries = filter(None, map(json_of, engine.logs(last).splitlines()))
    return any(entry.get("call") in ("begin_round", "train") for entry in entries)


def json_of(line):
    try:
        return json.loads(line)
    except ValueError:
        return None


def send(container, number):
    """A signal to the program, from within: to the engine, one that is killed has crashed. The
    program is below tini and, at a participant, below the script that claims a slice."""
    code = (
        "import os; pid = '1'\n"
        "while below := open(f'/proc/{pid}/task/{pid}/children').read().split(): pid = below[0]\n"
        f"os.kill(int(pid), {number:d})"
    )
    status, output, errors = engine.run("docker", "exec", container, "python", "-c", code)
    # The container of a killed program may end before the command in it does.
    assert status == 0 or number == signal.SIGKILL, errors or output


def check_model(stack, session, authority):
    """The last model is in the bucket, is what the status says, and has learnt something."""
    client = boto3.client(
        "s3",
        endpoint_url=f"https://127.0.0.1:{stack.ports['XAIN_S3_PORT']}",
        verify=authority,
        region_name="us-east-1",
        aws_access_key_id=stack.secret("s3-secrets", "access-key-id"),
        aws_secret_access_key=stack.secret("s3-secrets", "secret-access-key"),
    )
    try:
        wanted = f"{session}/{ROUNDS}/global"
        body = client.get_object(Bucket="xain", Key=wanted)["Body"].read()
        models = [f"{session}/{round_}/global" for round_ in range(ROUNDS + 1)]
        listed = client.list_objects_v2(Bucket="xain")["Contents"]
        assert set(models) <= {item["Key"] for item in listed}
        with pytest.raises(ClientError) as refused:  # the identity is for one bucket
            client.create_bucket(Bucket="another")
        assert refused.value.response["Error"]["Code"] == "AccessDenied"
    finally:
        client.close()
    vector = np.load(io.BytesIO(body), allow_pickle=False)
    told = stack.status().models.models[-1]
    assert told.round == ROUNDS
    assert told.ref.size_bytes == len(body)
    layout = tuple(TensorSpec(t.name, tuple(t.shape), t.dtype) for t in told.layout)
    model = Model(vector, layout, dict(told.metadata))
    digits = load("digits", dialect=Dialect(scale=0.0625))
    assert workload.evaluate(model, digits)["accuracy"] > 0.9


def check_take_home(stack, folder):
    """The page's commands bring the best model, the last one and the report out of the stack."""
    page = (engine.ROOT / "docs/containers.md").read_text(encoding="utf-8")
    page = page.partition("Take the best model home")[2].partition("In Kubernetes")[0]
    lines = re.findall(r"^    docker compose (.+)$", page, re.MULTILINE)
    assert len(lines) == 9
    folder.mkdir()
    for line in lines:
        words = [str(folder) if word == "." else word for word in shlex.split(line)]
        if words[0] == "exec":
            words.insert(1, "--no-TTY")
        stack.compose(*words)
    assert {file.name for file in folder.iterdir()} == {"best.skops", "last.onnx", "report.html"}
    data = folder / "digits.csv"
    digits = load("digits", dialect=Dialect(scale=0.0625))
    header = ",".join(digits.feature_names)
    np.savetxt(data, digits.features, "%.6g", ",", header=header, comments="")
    predict = ["-m", "xain_coordinator", "predict", f"--data={data}", f"--to={folder / 'p.csv'}"]
    command = [sys.executable, *predict, f"--model={folder / 'best.skops'}"]
    status, output, errors = engine.run(*command)
    assert status == 0, errors
    assert (folder / "p.csv").read_text().count("\n") == 1 + digits.num_samples, output


def check_metrics(stack, ids, authority):
    """Each round once, with its updates; and what every participant has reported."""
    url = f"https://127.0.0.1:{stack.ports['XAIN_INFLUXDB_PORT']}"
    token = stack.secret("influxdb-secrets", "token")

    def series(measurement, field):
        return time_series.read(url, token, measurement, field, authority)

    def updates():
        return series("coordinator", "num_updates").get("", {})

    wait_until("the points of all rounds are there", lambda: len(updates()) >= ROUNDS)
    assert list(updates().values()) == [NUM_PARTICIPANTS] * ROUNDS
    for field in ("update_bytes", "round_seconds", "aggregation_seconds"):
        assert all(value > 0 for value in series("coordinator", field)[""].values())
    states = series("coordinator", "state")[""]
    assert list(states.values())[-1] == 2  # FINISHED
    for field in ("accuracy", "loss", "test_accuracy"):
        reported = series("participant", field)
        assert sorted(reported) == ids
        # Points of the first round may have waited to be written when the coordinator was killed.
        assert min(map(len, reported.values())) >= ROUNDS - 1
    accuracies = series("participant", "accuracy").values()
    assert min(list(values.values())[-1] for values in accuracies) > 0.8


SECRETS = {
    "s3-secrets": ("tls/private.key",),
    "coordinator-secrets": ("s3-access-key-id", "s3-secret-access-key", "influxdb-token"),
    "grafana-secrets": ("password", "token"),
    "influxdb-secrets": ("password", "token", "tls/private.key"),
}


def check_secrecy(stack):
    """No credential and no presigned URL in any log, in the status, or in what the engine tells of
    a container; and a second start makes no new ones."""
    values = {stack.secret(volume, file) for volume, files in SECRETS.items() for file in files}
    assert len(values) == 7
    assert min(map(len, values)) >= 20
    told = [stack.logs(), str(stack.status())]
    told += [docker("inspect", name) for service in SERVICES for name in stack.containers(service)]
    for text in told:
        assert len(text) > 100
        assert "X-Amz-Signature" not in text
        assert not [value for value in values if value in text]

    assert "made " not in stack.compose("run", "--rm", "setup")
    again = {stack.secret(volume, file) for volume, files in SECRETS.items() for file in files}
    assert again == values
