"""The images, run by a real Docker engine as strictly as the stacks run them."""

import importlib.util
import json
import os
import re
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from support.containers import engine
from support.containers.engine import BAGGING, COORDINATOR, NEURAL, PARTICIPANT, docker

pytestmark = pytest.mark.timeout(2700)

# The coordinator's exports models: scikit-learn, skops and ONNX. Of each, 12 MB are cryptography.
MAX_BYTES = {COORDINATOR: 560_000_000, PARTICIPANT: 411_000_000}
# Of python:3.11-slim for amd64. A stand-in is smaller, and must not make ours look so.
BASE_BYTES = 131_000_000

PYTHON = ("--entrypoint=python",)
ALIVE_FILE = "XAIN_PARTICIPANT_PARTICIPANT__ALIVE_FILE"

# As Docker puts them into containers if its client's settings say so. There is no answer there.
PROXIES = tuple(f"--env={name}=http://127.0.0.1:9" for name in ("http_proxy", "https_proxy"))


@pytest.fixture(autouse=True)
def _images():
    engine.require()
    engine.build(PARTICIPANT, BAGGING, NEURAL)


@pytest.fixture
def containers():
    with engine.containers() as mine:
        yield mine


def python(containers, image, code, *options):
    """The output of Python code in the image."""
    return containers.run(image, "-c", code, options=(*PYTHON, *options))


@pytest.mark.parametrize("image", [COORDINATOR, PARTICIPANT])
def test_images_are_small(image):
    base = engine.inspect(engine.BASE)["Size"]
    assert engine.inspect(image)["Size"] - base + max(base, BASE_BYTES) < MAX_BYTES[image]


@pytest.mark.parametrize(
    ("image", "part"),
    [
        (COORDINATOR, "coordinator"),
        (PARTICIPANT, "participant"),
        (BAGGING, "participant"),
        (NEURAL, "participant"),
    ],
)
def test_images_have_version_labels_and_an_unprivileged_user(image, part):
    """Labels with the version that is inside, an unprivileged user, and programs that signals
    reach: no shell in between."""
    project = tomllib.loads((engine.ROOT / part / "pyproject.toml").read_text(encoding="utf-8"))
    config = engine.inspect(image)["Config"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == image.partition(":")[0]
    assert labels["org.opencontainers.image.version"] == project["project"]["version"]
    assert labels["org.opencontainers.image.licenses"] == project["project"]["license"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == [f"xain-{part}"]


@pytest.mark.parametrize("image", [COORDINATOR, PARTICIPANT])
def test_images_hold_no_secrets(image):
    """No layer and no variable of the environment sets anything that sounds like a secret."""
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    environment = "\n".join(engine.inspect(image)["Config"]["Env"])
    for text in (history, environment):
        assert not re.search(r"(?i)(password|secret|token|credential|access_key)", text), text


FILES = """
import os
for folder, _, files in os.walk("/"):
    if not folder.startswith(("/proc", "/sys", "/dev")):
        for file in files:
            print(os.path.join(folder, file))
"""
DATA = re.compile(r"\.(arff|csv|h5|libsvm|npy|npz|parquet|svm|svmlight|gz|zip)$")

SITE_PACKAGES = "/opt/xain/lib/python3.11/site-packages"
# Descriptions of interfaces, time zones, and the data sets that scikit-learn brings along.
LIBRARIES_OWN = tuple(
    f"{SITE_PACKAGES}/{folder}/"
    for folder in ("botocore/data", "dateutil/zoneinfo", "sklearn/datasets/data")
)


def test_images_hold_their_own_parts_only(containers):
    """No data but what scikit-learn brings along, no other program, no tools and caches of the
    build; neither image carries the other's program."""
    for image in (COORDINATOR, PARTICIPANT):
        files = python(containers, image, FILES).splitlines()
        ours = [file for file in files if file.startswith("/opt/xain/")]
        assert len(ours) > 1000
        data = [file for file in ours if DATA.search(file)]
        data += [file for file in files if re.match(r"/(data|home|root|src|wheels|srv)/.", file)]
        assert not [file for file in data if not file.startswith(LIBRARIES_OWN)]
        tops = {file.split("/")[6] for file in ours if "/site-packages/" in file}
        assert not tops & {"hatchling", "pip", "setuptools"}
        assert not [file for file in files if "/.cache/" in file]
        if image == COORDINATOR:
            assert "xain_coordinator" in tops
            assert not tops & {"xain_participant", "torch", "xgboost"}
        else:
            assert "xain_participant" in tops
            assert not tops & {"xain_coordinator", "boto3", "influxdb_client"}


def test_a_training_between_containers(containers, tmp_path):
    """A coordinator on its embedded stores and two participants, one with a CSV and one with a
    Parquet file: unprivileged, on read-only file systems, each ends well."""
    rows = [(i % 7, i % 5, "yes" if i % 7 > 3 else "no") for i in range(200)]
    lines = [",".join(map(str, row)) for row in rows]
    (tmp_path / "a.csv").write_text("\n".join(["age,dose,outcome", *lines, ""]))
    columns = dict(zip(("age", "dose", "outcome"), zip(*rows, strict=True), strict=True))
    parquet.write_table(pa.table({k: list(v) for k, v in columns.items()}), tmp_path / "b.parquet")
    tmp_path.chmod(0o755)

    data = containers.volume()
    coordinator = containers.start(
        COORDINATOR,
        "--insecure",
        "--workload=sgd",
        "--min-participants=2",
        "--rounds=3",
        options=(f"--volume={data}:/var/lib/xain", "--network-alias=coordinator"),
    )
    engine.wait_healthy(coordinator)
    participants = [
        containers.start(
            PARTICIPANT,
            "--coordinator=coordinator:50051",
            "--insecure",
            f"--data=/data/{file}",
            "--target=outcome",
            options=(f"--volume={tmp_path}:/data:ro",),
        )
        for file in ("a.csv", "b.parquet")
    ]
    for participant in participants:
        assert containers.wait(participant) == 0, engine.logs(participant)

    status = json.loads(docker("exec", coordinator, "xain-coordinator", "status", "--json"))
    assert status["status"]["phase"] == "finished"
    assert len(status["models"]) >= 3
    identity = docker("exec", coordinator, "python", "-c", "import os; print(os.getresuid())")
    assert identity == "(10001, 10001, 10001)"
    code, _, errors = engine.run("docker", "exec", coordinator, "touch", "/opt/xain/new")
    assert code != 0
    assert "Read-only file system" in errors

    docker("stop", "--time=60", coordinator)
    state = engine.inspect(coordinator)["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False), engine.logs(coordinator)
    assert '"stopped"' in engine.logs(coordinator)

    docker("start", coordinator)
    engine.wait_healthy(coordinator)
    again = json.loads(docker("exec", coordinator, "xain-coordinator", "status", "--json"))
    assert again["status"]["session_id"] == status["status"]["session_id"]


# PyTorch and what it imports; a container sees these folders of the test's own environment.
TORCH = ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe")
TORCH += ("filelock", "fsspec", "typing_extensions.py")


def torch_mounts() -> tuple[str, ...]:
    """Mounts of the installed PyTorch at /opt/torch, which an image without it imports."""
    if engine.TORCH_OPTIONS in os.environ:
        return ()  # the image has its own
    mounts = []
    for name in TORCH:
        found = importlib.util.find_spec(name.removesuffix(".py"))
        if found is not None and found.origin is not None:
            path = Path(found.origin)
            path = path if name.endswith(".py") else path.parent
            mounts.append(f"--volume={path.resolve()}:/opt/torch/{name}:ro")
    return ("--env=PYTHONPATH=/opt/torch", *mounts)


def test_neural_network_trains_between_containers(containers):
    """Two participants of the image `neural` train a network of a list of layers in two stages,
    which needs more of PyTorch than training in one does. The coordinator has no PyTorch, and a
    participant has the memory that the manifests of Kubernetes give it."""
    rounds = 3
    coordinator = containers.start(
        COORDINATOR,
        "--insecure",
        "--workload=neural",
        "--min-participants=2",
        f"--rounds={rounds}",
        "--set=rounds.epochs=10",
        "--set=workload.options.mode=pipeline",
        "--set=aggregation.rule=assemble",
        "--set=workload.options.learning_rate=0.05",
        options=(f"--volume={containers.volume()}:/var/lib/xain", "--network-alias=coordinator"),
    )
    engine.wait_healthy(coordinator)
    participants = [
        containers.start(
            NEURAL,
            *(
                "--coordinator=coordinator:50051",
                "--insecure",
                "--data=breast_cancer",
                f"--id=site-{index}",
            ),
            "--set=training.process_group_insecure=true",
            options=("--memory=1g", *torch_mounts()),
        )
        for index in range(2)
    ]
    for participant in participants:
        assert containers.wait(participant) == 0, engine.logs(participant)
    models = json.loads(docker("exec", coordinator, "xain-coordinator", "status", "--json"))
    (measured,) = [one for one in models["rounds"] if one["round"] == rounds]
    assert measured["evaluation"]["metrics"]["accuracy"] > 0.9


def test_a_participant_ends_on_sigterm(containers):
    """With the status that tells an orchestrator to start it elsewhere, and without waiting for a
    coordinator that is not there."""
    participant = containers.start(
        PARTICIPANT, "--coordinator=nowhere:50051", "--insecure", "--data=digits"
    )
    engine.wait_until(
        "the participant tries to join", lambda: '"coordinator_away"' in engine.logs(participant)
    )
    docker("stop", "--time=60", participant)
    state = engine.inspect(participant)["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (143, False), engine.logs(participant)


def test_health_follows_the_participant(containers):
    """Healthy while it waits for a coordinator that is not there. What it says holds for a while,
    so here another process makes it out of date."""
    participant = containers.start(
        PARTICIPANT,
        "--coordinator=nowhere:50051",
        "--insecure",
        "--data=digits",
        options=("--health-interval=1s", "--health-start-period=0s", "--health-retries=180"),
    )
    engine.wait_healthy(participant)
    check = ("docker", "exec", participant, "python", "/opt/xain/alive.py")
    assert engine.run(*check)[:2] == (0, "alive\n")
    docker("kill", "--signal=STOP", participant)
    set_time = f"import os; os.utime(os.environ['{ALIVE_FILE}'], (%s, %s))"
    docker("exec", participant, "python", "-c", set_time % (1, 1))
    code, output, _ = engine.run(*check)
    assert code == 1
    assert re.fullmatch(r"a sign of life is \d+ s late\n", output)
    docker("exec", participant, "python", "-c", set_time % (0, 0))
    assert engine.run(*check)[:2] == (1, "not begun yet\n")
    docker("kill", "--signal=CONT", participant)
    engine.wait_until("alive again", lambda: engine.run(*check)[0] == 0)


def test_health_follows_the_coordinator(containers):
    """Healthy while it serves, unhealthy while it hangs, healthy again after."""
    coordinator = containers.start(
        COORDINATOR,
        "--insecure",
        options=("--health-interval=1s", "--health-timeout=10s", "--health-retries=2", *PROXIES),
    )
    engine.wait_healthy(coordinator)
    assert "standby" in docker("exec", coordinator, "xain-coordinator", "status")
    docker("kill", "--signal=STOP", coordinator)
    engine.wait_until("unhealthy", lambda: engine.health(coordinator) == "unhealthy")
    docker("kill", "--signal=CONT", coordinator)
    engine.wait_healthy(coordinator)


EVERYTHING = """
from xain_workloads import workload
from xain_workloads.tables.data import BUNDLED, load
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.linear.sgd_options import LOSSES

for source in ("/data/x.csv", "/data/x.parquet", "/data/x.npz", "/data/x.svm"):
    data = load(source)
    assert (data.num_samples, data.num_features) == (6, 2), source
    print(source)
for source in BUNDLED:
    task = "regression" if source == "diabetes" else "classification"
    data = load(source, task=task, dialect=Dialect(scale=1 / 1024))
    for loss in LOSSES[task]:
        for penalty in ("l2", "elasticnet"):
            options = {"task": task, "loss": loss, "penalty": penalty, "eta0": 1e-4}
            kind = workload.create("sgd", options)
            model = workload.fit_centralised(kind, data, epochs=1, seed=0)
            kind.predict(model, data.features)
            print(source, loss, kind.measure(model, data).metrics)
    kind = workload.create("mlp", {"task": task})
    print(source, workload.evaluate(workload.fit_centralised(kind, data, epochs=1, seed=0), data))
"""


def test_the_participant_can_do_everything(containers, tmp_path):
    """The trimmed libraries still have every format, bundled data set, loss and help text."""
    features, target = np.arange(12.0).reshape(6, 2), np.array(["a", "b"] * 3)
    table = pa.table({"p": features[:, 0], "q": features[:, 1], "label": target})
    parquet.write_table(table, tmp_path / "x.parquet", compression="zstd")
    rows = [f"{p},{q},{label}" for (p, q), label in zip(features, target, strict=True)]
    (tmp_path / "x.csv").write_text("\n".join(["p,q,label", *rows, ""]))
    lines = [f"{i % 2} 1:{p} 2:{q}" for i, (p, q) in enumerate(features + 1)]
    (tmp_path / "x.svm").write_text("\n".join([*lines, ""]))
    np.savez(tmp_path / "x.npz", X=features, y=target)
    tmp_path.chmod(0o755)
    mounted = f"--volume={tmp_path}:/data:ro"
    output = python(containers, PARTICIPANT, EVERYTHING, mounted)
    assert "squared_epsilon_insensitive" in output
    assert "--partition" in containers.run(PARTICIPANT, "--help")


def test_replicas_claim_slices(containers, tmp_path):
    """Each has another slice, one that is too many ends with a reason, and the slice of one that
    was killed is free again."""
    for index in range(2):
        (tmp_path / str(index)).touch()
    tmp_path.chmod(0o755)
    script = engine.ROOT / "deploy/compose/claim_slice.py"
    options = (
        *PYTHON,
        f"--volume={tmp_path}:/run/slices:ro",
        f"--volume={script}:/claim_slice.py:ro",
        "--env=XAIN_PARTICIPANT_PARTITION__NUM_PARTS=2",
    )
    # It holds its slice, asleep, until it is killed.
    show = 'echo "$XAIN_PARTICIPANT_PARTITION__INDEX $XAIN_PARTICIPANT_PARTICIPANT__ID"; sleep 900'

    def claim():
        return containers.start(PARTICIPANT, "/claim_slice.py", "sh", "-c", show, options=options)

    def claimed(name):
        engine.wait_until(f"{name} has said something", lambda: engine.logs(name))
        return engine.logs(name).strip()

    first = claim()
    assert claimed(first) == "0 slice-0"
    second = claim()
    assert claimed(second) == "1 slice-1"
    third = claim()
    assert containers.wait(third) == 1
    assert "all 2 slices are taken" in engine.logs(third)
    docker("kill", first)
    assert claimed(claim()) == "0 slice-0"
