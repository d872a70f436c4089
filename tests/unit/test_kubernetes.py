"""The manifests under deploy/kubernetes: valid, and fitting together. No cluster is needed."""

import itertools
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.command_lines import parsed
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.process.run import LAST_STEPS_S, PATIENCE_S
from xain_coordinator.server.operators_socket import socket_beside
from xain_foundation.exit_statuses import EXIT_FAILED, FINAL
from xain_foundation.security.identity import SCHEDULER
from xain_foundation.settings.settings import load
from xain_parameters.config import ENV_PREFIX, ServerSettings
from xain_participant.config import ParticipantConfig

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
KINDS = ("gradient", "bagging", "neural")
KUSTOMIZATIONS = ("base", "own-data", *KINDS)  # with a coordinator
SPARSE = "sparse"  # with a parameter server
ALL = (*KUSTOMIZATIONS, SPARSE)
JOBS = (("base", "xain-participant"), (SPARSE, "xain-participant sparse"))
BASE_IMAGES = {"xain-coordinator", "xain-participant-sgd"}
MANIFESTS = sorted(file for file in KUBERNETES.rglob("*.yaml") if file.name != "kustomization.yaml")
NAME = "app.kubernetes.io/name"
WARD = KUBERNETES / "own-data/ward-7"

Document = dict[str, Any]


def documents(file: Path) -> list[Document]:
    # The loader in C, ten times as fast.
    return list(yaml.load_all(file.read_text(encoding="utf-8"), yaml.CSafeLoader))


def kustomization(name: str) -> Document:
    (document,) = documents(KUBERNETES / name / "kustomization.yaml")
    return document


def nested(folder: Path) -> str:
    """The name of the folder as a kustomization."""
    return str(folder.resolve().relative_to(KUBERNETES))


def resources(name: str) -> list[Document]:
    """Documents of a kustomization: its files and its base, without the deleted ones."""
    folder = KUBERNETES / name
    found = []
    for path in kustomization(name)["resources"]:
        if (folder / path).is_dir():
            found += resources(nested(folder / path))
        else:
            found += documents(folder / path)
    deleted = [patch["target"] for patch in kustomization(name).get("patches", ())]
    return [
        document
        for document in found
        if {"kind": document["kind"], "name": document["metadata"]["name"]} not in deleted
    ]


def specs(name: str, kind: str) -> list[Document]:
    return [document["spec"] for document in resources(name) if document["kind"] == kind]


def spec_of(name: str, kind: str, title: str = "") -> Document:
    """Specification of the only document of a kind, or of this name."""
    found = [d for d in resources(name) if d["kind"] == kind]
    (document,) = [d for d in found if title in ("", d["metadata"]["name"])]
    spec: Document = document["spec"]
    return spec


def config_maps(name: str) -> dict[str, list[Path]]:
    """Files of each ConfigMap, by its name."""
    folder = KUBERNETES / name
    maps: dict[str, list[Path]] = {}
    for path in kustomization(name)["resources"]:
        if (folder / path).is_dir():
            maps |= config_maps(nested(folder / path))
    for generator in kustomization(name).get("configMapGenerator", ()):
        assert (generator["name"] in maps) == (generator.get("behavior") == "replace"), generator
        maps[generator["name"]] = [folder / file for file in generator["files"]]
    return maps


def pod_templates(name: str) -> dict[str, Document]:
    """Templates of pods by "Kind/name"."""
    return {
        f"{document['kind']}/{document['metadata']['name']}": document["spec"]["template"]
        for document in resources(name)
        if "template" in document.get("spec", {})
    }


def of_pod(pod: Document) -> list[Document]:
    """Containers, those before the others among them."""
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def containers(name: str) -> list[Document]:
    return [c for pod in pod_templates(name).values() for c in of_pod(pod)]


def require_valid(file: Path, *options: str) -> None:
    """Fail unless every document fits Kubernetes' own schema, without unknown fields."""
    program = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run(
        [program, "--strict", *options, file],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_are_valid(file):
    """Every document fits the schema of the newest Kubernetes."""
    require_valid(file)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no program called kubectl")
@pytest.mark.parametrize("name", ALL)
def test_rendered_kustomizations_are_valid(name, tmp_path):
    """`kubectl kustomize` renders what the other tests read from the files, and every document fits
    the schemas of the oldest Kubernetes that docs/kubernetes.md names and of the newest."""
    command = ("kubectl", "kustomize", str(KUBERNETES / name))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    file = tmp_path / f"{name}.yaml"
    file.write_text(done.stdout, encoding="utf-8")
    require_valid(file)
    require_valid(file, "--kubernetes-version=1.30")

    rendered = [document for document in documents(file) if document["kind"] != "ConfigMap"]
    titles = sorted((d["kind"], d["metadata"]["name"]) for d in rendered)
    assert titles == sorted((d["kind"], d["metadata"]["name"]) for d in resources(name))
    images = {image["name"]: image["newName"] for image in kustomization(name).get("images", ())}
    expected = []
    for container in containers(name):
        image, _, tag = container["image"].partition(":")
        expected.append(f"{images.get(image, image)}:{tag}")
    pods = [d["spec"]["template"] for d in rendered if "template" in d.get("spec", {})]
    assert sorted(c["image"] for pod in pods for c in of_pod(pod)) == sorted(expected)


def test_nothing_is_left_out():
    """Every manifest is in a kustomization, but for the example, which is in none."""
    applied = {
        (file.parent / path).resolve()
        for file in KUBERNETES.rglob("kustomization.yaml")
        for path in kustomization(nested(file.parent))["resources"]
    }
    example = KUBERNETES / "secret.example.yaml"
    assert example not in applied
    assert {file for file in MANIFESTS if file != example} == {
        path for path in applied if path.is_file()
    }


@pytest.mark.parametrize("name", ALL)
def test_deleted_resources_exist(name):
    """A patch that deletes nothing would leave two sets of participants."""
    base = resources("base")
    existing = [{"kind": d["kind"], "name": d["metadata"]["name"]} for d in base]
    for patch in kustomization(name).get("patches", ()):
        assert patch["target"] in existing
        body = yaml.safe_load(patch["patch"])
        assert body["$patch"] == "delete"
        assert body["kind"] == patch["target"]["kind"]
        assert body["metadata"]["name"] == patch["target"]["name"]


@pytest.mark.parametrize("name", ALL)
def test_selectors_find_pods(name):
    """Services, controllers, budgets and policies select labels that a pod template has."""
    labels = [pod["metadata"]["labels"] for pod in pod_templates(name).values()]
    for document in resources(name):
        selector = document.get("spec", {}).get("selector", {})
        selector = selector.get("matchLabels", selector)
        if document["kind"] == "NetworkPolicy":
            selector = document["spec"]["podSelector"].get("matchLabels", {})
        if selector:
            assert any(selector.items() <= has.items() for has in labels), document["metadata"]
        if "template" in document.get("spec", {}) and document["kind"] != "Job":
            assert selector.items() <= document["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", ALL)
def test_references_exist(name):
    """Config maps, secrets, claims, service accounts and headless services that pods name."""
    there = {(d["kind"], d["metadata"]["name"]) for d in resources(name)}
    (example,) = documents(KUBERNETES / "secret.example.yaml")
    page = (KUBERNETES.parents[1] / "docs/kubernetes.md").read_text(encoding="utf-8")
    secrets = {example["metadata"]["name"], *re.findall(r"create secret generic (\S+)", page)}
    for title, pod in pod_templates(name).items():
        spec = pod["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in there, title
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps(name), title
            elif "secret" in volume:
                assert volume["secret"]["secretName"] in secrets, title
            elif "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in there, title
            else:
                assert "sizeLimit" in volume["emptyDir"], title
        (owner,) = [d for d in resources(name) if f"{d['kind']}/{d['metadata']['name']}" == title]
        claims = [c["metadata"]["name"] for c in owner["spec"].get("volumeClaimTemplates", ())]
        mounts = {m["name"] for container in of_pod(pod) for m in container["volumeMounts"]}
        assert mounts == {*volumes, *claims}, title
        if owner["kind"] == "StatefulSet":
            assert ("Service", owner["spec"]["serviceName"]) in there


@pytest.mark.parametrize("name", ALL)
def test_pods_are_restricted(name):
    """Pods meet the standard that the namespace enforces, and have a read-only root besides."""
    for title, pod in pod_templates(name).items():
        spec = pod["spec"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, title
        assert context["runAsUser"] == 10001, title  # the images' own
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, title
        assert spec["automountServiceAccountToken"] is False, title
        for container in of_pod(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, title
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, title
            assert "memory" in container["resources"]["limits"], title


@pytest.mark.parametrize("name", ALL)
def test_images_have_our_version(name):
    """A tag, and the one that is built here."""
    root = KUBERNETES.parents[1]
    for container in containers(name):
        image, _, tag = container["image"].partition(":")
        part = "coordinator" if image == "xain-coordinator" else "participant"
        project = tomllib.loads((root / part / "pyproject.toml").read_text(encoding="utf-8"))
        assert tag == project["project"]["version"]
        ours = {"xain-participant-sparse"} if name == SPARSE else BASE_IMAGES
        assert image in ours


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_training_has_its_image(kind):
    """The indexed Job of the base gets the image whose target trains the workload."""
    (coordinator,) = config_maps(kind)["coordinator-config"]
    workload = load(CoordinatorConfig, coordinator).workload
    renamed = {image["name"]: image["newName"] for image in kustomization(kind).get("images", ())}
    job = spec_of(kind, "Job")
    (container,) = job["template"]["spec"]["containers"]
    name = container["image"].partition(":")[0]
    assert renamed.keys() <= {name}
    assert renamed.get(name, name) == f"xain-participant-{workload.name}"
    assert job["completionMode"] == "Indexed"
    if kind == "gradient":
        assert workload.options["mode"] == kind


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_settings_can_be_loaded(name):
    """The TOML in the config maps goes through our own checks, and its paths are mounted."""
    maps = config_maps(name)
    (file,) = maps["coordinator-config"]
    coordinator = load(CoordinatorConfig, file)
    for title, files in maps.items():
        if title.startswith("participant"):
            load(ParticipantConfig, files[0])

    template = pod_templates(name)["StatefulSet/coordinator"]["spec"]
    (container,) = template["containers"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    # --resume: changed settings must not keep it from serving.
    assert container["args"] == ["--resume"]
    (named,) = (one for one in container["env"] if one["name"] == "XAIN_COORDINATOR_CONFIG")
    assert named["value"] == str(mounts["config"] / file.name)
    assert coordinator.journal.path.is_relative_to(mounts["data"])
    (example,) = documents(KUBERNETES / "secret.example.yaml")
    for secret in (
        coordinator.storage.access_key_id_file,
        coordinator.storage.secret_access_key_file,
        coordinator.metrics.token_file,
    ):
        assert secret.parent == mounts["credentials"]
        assert secret.name in example["stringData"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    server = coordinator.server
    assert ports == {"grpc": server.port, "weights": server.weights_port}
    # Another 8 s at most for what comes after the drain.
    assert template["terminationGracePeriodSeconds"] >= coordinator.server.drain_s + 8


def test_the_job_suits_the_rounds(monkeypatch):
    """Slices, pods that run at once, and what a round waits for are one number."""
    job = spec_of("base", "Job")
    (container,) = job["template"]["spec"]["containers"]
    for env in container["env"]:
        monkeypatch.setenv(env["name"], env.get("value", "2"))
    maps = config_maps("base")
    participant = load(ParticipantConfig, maps["participant-config"][0], "XAIN_PARTICIPANT_")
    assert participant.partition.index == 2

    rounds = load(CoordinatorConfig, maps["coordinator-config"][0]).rounds
    num = job["completions"]
    assert job["parallelism"] == num
    assert participant.partition.num_parts == num
    assert rounds.effective_start_participants == num
    assert spec_of("base", "PodDisruptionBudget")["minAvailable"] == rounds.num_required


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_a_training_can_begin(name):
    """There are as many participants as a round of the same kustomization needs."""
    (coordinator,) = config_maps(name)["coordinator-config"]
    rounds = load(CoordinatorConfig, coordinator).rounds
    num_participants = sum(
        document["spec"].get("parallelism", document["spec"].get("replicas"))
        for document in resources(name)
        if document["kind"] in {"Job", "Deployment"}
        and document["spec"]["template"]["metadata"]["labels"][NAME] == "participant"
    )
    assert rounds.num_required <= rounds.effective_start_participants <= num_participants
    assert num_participants <= rounds.effective_max_participants


def test_copies_of_a_ward_do_not_meet():
    """The folder with another name in all its files, as the docs say: nothing has the same name,
    and no Deployment takes the pods of another one for its own."""
    found = {}
    for name in ("ward-7", "ward-8"):
        texts = [file.read_text(encoding="utf-8") for file in WARD.glob("*.yaml")]
        found[name] = [
            document
            for text in texts
            for document in yaml.safe_load_all(text.replace("ward-7", name))
        ]
    names = [
        {(d["kind"], d["metadata"]["name"]) for d in documents_ if "metadata" in d}
        | {g["name"] for d in documents_ for g in d.get("configMapGenerator", ())}
        for documents_ in found.values()
    ]
    assert len(names[0]) == 4
    assert not names[0] & names[1]
    (mine,), (other,) = (
        [d["spec"] for d in documents_ if d["kind"] == "Deployment"]
        for documents_ in found.values()
    )
    labels = other["template"]["metadata"]["labels"]
    assert not mine["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_coordinators_are_closed(name):
    """The certificate is made where the coordinator looks for it, for the name that participants
    connect to."""
    (file,) = config_maps(name)["coordinator-config"]
    settings = load(CoordinatorConfig, file)
    assert not settings.server.insecure
    pod = pod_templates(name)["StatefulSet/coordinator"]
    (before,) = pod["spec"]["initContainers"]
    *_, script = before["command"]
    made, command = script.split(" || exec ")
    assert made == f"[ -e {settings.access_folder}/tls ]"
    words = command.split()
    assert words[:3] == ["xain-coordinator", "certs", "init"]
    hosts = [host for flag, host in itertools.pairwise(words[3:]) if flag == "--host"]
    services = {d["metadata"]["name"] for d in resources(name) if d["kind"] == "Service"}
    for title, files in config_maps(name).items():
        if title != "coordinator-config":
            host = load(ParticipantConfig, files[0]).coordinator.host
            assert host == hosts[0]
            assert host in services
    claimed = {"name": "data", "mountPath": str(settings.journal.path.parent)}
    assert claimed in before["volumeMounts"]


def joining(name):
    """(init container that joins, the participant beside it, its settings)"""
    ((_, pod),) = ((t, p) for t, p in pod_templates(name).items() if "/participant" in t)
    spec = pod["spec"]
    ((_, files),) = ((t, f) for t, f in config_maps(name).items() if t in str(spec["volumes"]))
    return spec["initContainers"][-1], spec["containers"][0], files[0]


@pytest.mark.parametrize("name", ["base", "own-data"])
def test_participants_join_before_they_take_part(name, tmp_path, monkeypatch):
    """Each with a token of its own, into the folder that it is started with; while that fails it is
    tried again, until the pod is stopped."""
    before, container, file = joining(name)
    for env in before.get("env", ()):
        monkeypatch.setenv(env["name"], env.get("value", "2"))
    folder = load(ParticipantConfig, file, "XAIN_PARTICIPANT_").participant.state_dir
    for one in (before, container):
        assert {"name": "state", "mountPath": str(folder)} in one["volumeMounts"]
    mounts = {mount["name"]: mount["mountPath"] for mount in before["volumeMounts"]}
    script = before["command"][-1].replace("$(XAIN_PARTICIPANT_PARTITION__INDEX)", "2")
    assert f"--config {mounts['config']}/participant.toml" in script
    token = {"base": "slice-2", "own-data": WARD.name}[name]
    assert f'"{mounts["token"]}/{token}.token"' in script
    # A container with this volume would have the tokens of all.
    assert "token" not in {mount["name"] for mount in container["volumeMounts"]}

    stub = tmp_path / "xain-participant"
    stub.write_text(f"#!/bin/sh\necho tried\n[ -e {tmp_path}/works ]\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    command = [*before["command"][:-1], script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "tried\n"
            process.terminate()
            assert process.wait(60) == 143
        finally:
            process.kill()
    (tmp_path / "works").touch()
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def wait_until_it_handles(number, pid):
    """Wait until the process handles the signal, which would end it without a word before."""
    deadline = time.monotonic() + 60
    while True:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        if int(caught, 16) >> (number - 1) & 1:
            return
        assert time.monotonic() < deadline, "it never does"
        time.sleep(0.01)  # a poll, not a race: it ends when it does


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="cannot see who handles signals")
def test_a_ward_waits_for_its_data(tmp_path):
    """The container before the participant ends when the file is there that the participant reads,
    and at once when it is stopped."""
    spec = spec_of("own-data", "Deployment")["template"]["spec"]
    (before, _), (container,) = spec["initContainers"], spec["containers"]
    source = load(ParticipantConfig, WARD / "participant.toml").data.source
    paths = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    (mount,) = before["volumeMounts"]
    assert Path(source).parent == Path(mount["mountPath"]) == Path(paths[mount["name"]])
    assert "readOnly" not in mount
    file = tmp_path / Path(source).name
    command = [word.replace(source, str(file)) for word in before["command"]]
    assert str(file) in command[-1]
    for end in (lambda process: file.touch(), lambda process: process.terminate()):
        file.unlink(missing_ok=True)
        with subprocess.Popen(command) as process:
            try:
                wait_until_it_handles(signal.SIGTERM, process.pid)
                assert process.poll() is None
                end(process)
                assert process.wait(60) == (0 if file.exists() else 143)
            finally:
                process.kill()


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_probes_restart_hanging_containers_only(name):
    """Each of ours is started again if it hangs, and not while it begins or ends."""
    root = KUBERNETES.parents[1]
    settings = load(CoordinatorConfig, config_maps(name)["coordinator-config"][0])
    for title, pod in pod_templates(name).items():
        (container,) = pod["spec"]["containers"]
        liveness, startup = container["livenessProbe"], container["startupProbe"]
        patience_s = liveness["periodSeconds"] * liveness["failureThreshold"]
        if title == "StatefulSet/coordinator":
            command = liveness["exec"]["command"]
            assert command == startup["exec"]["command"]
            assert command[-1] == "--alive"
            dockerfile = (root / "coordinator/Dockerfile").read_text(encoding="utf-8")
            assert f"CMD {json.dumps(command[:-1])}" in dockerfile
            # Where the socket is that it asks.
            health = runpy.run_path(str(root / "deploy/images/health.py"))
            folder = str(socket_beside(settings.journal.path).parent)
            assert folder in health["FOLDERS"]
            assert {"name": "data", "mountPath": folder} in container["volumeMounts"]
            for probe in (liveness, startup):
                assert probe["timeoutSeconds"] > health["TIMEOUT_S"]
            assert container["readinessProbe"]["exec"]["command"] == command[:-1]
            # A start that waits for its store ends by itself.
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 2 * PATIENCE_S
            # From the beginning of a drain there is no socket.
            assert patience_s > settings.server.drain_s + LAST_STEPS_S
        else:
            command = liveness["exec"]["command"]
            assert command == startup["exec"]["command"]
            dockerfile = (root / "participant/Dockerfile").read_text(encoding="utf-8")
            assert f"CMD {json.dumps(command)}" in dockerfile
            assert patience_s >= 120
            # Where the file is that it looks at.
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize("name", ALL)
def test_names_can_be_looked_up(name):
    """Where a cluster's DNS is: its pods, and the cache on each node."""
    (rule,) = spec_of(name, "NetworkPolicy", "dns")["egress"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"]
    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {
        ("UDP", 53),
        ("TCP", 53),
    }


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_everything_is_denied_that_is_not_allowed(name):
    """One policy closes all pods in both directions; ports in the others are ones we use, and
    numbers, which every network plug-in understands."""
    policies = specs(name, "NetworkPolicy")
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies
    settings = load(CoordinatorConfig, config_maps(name)["coordinator-config"][0])
    endpoints = (settings.storage.endpoint, settings.metrics.url)
    served = {settings.server.port, settings.server.weights_port}
    ours = {int(url.rpartition(":")[2]) for url in endpoints} | served | {53}
    allowed = [
        rule
        for policy in policies
        for rule in (*policy.get("ingress", ()), *policy.get("egress", ()))
    ]
    assert allowed
    for rule in allowed:
        assert rule.get("from") or rule.get("to"), rule
        assert rule["ports"], rule
        assert {port["port"] for port in rule["ports"]} <= ours


def command_of(container: Document) -> tuple[str, dict[str, Any]]:
    """(program, values of its parameters)"""
    (program,) = container.get("command", ["xain-participant"])
    return program, parsed(program, container["args"])


def sparse_pods() -> dict[str, Document]:
    """The container of each controller, by its name."""
    pods = pod_templates(SPARSE).items()
    return {title.partition("/")[2]: pod["spec"]["containers"][0] for title, pod in pods}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("StatefulSet/parameter-scheduler", [SCHEDULER]),
        ("StatefulSet/parameter-server", ["parameter-server-0", "parameter-server-1"]),
        ("Job/sparse-worker", ["worker-0", "worker-1", "worker-2", "worker-3"]),
    ],
)
def test_programs_have_certificates_of_their_own(kind, names, tmp_path):
    """The page makes one for each, and a pod copies its own, again where it starts again; the
    program sees no other."""
    spec = pod_templates(SPARSE)[kind]["spec"]
    before, container = spec["initContainers"][-1], spec["containers"][0]
    page = (KUBERNETES.parents[1] / "docs/kubernetes.md").read_text(encoding="utf-8")
    made = re.findall(r"^    for name in (.*); do certificate", page, re.MULTILINE)
    assert set(names) <= set(" ".join(made).split())
    given = {env["name"]: env.get("value", "") for env in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in before["volumeMounts"]}
    assert given[f"{ENV_PREFIX}TLS__FOLDER"] == mounts["tls"]
    own = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert own["tls"] == mounts["tls"]
    assert "certificates" not in own
    script = before["command"][-1]
    for volume, path in mounts.items():
        (tmp_path / volume).mkdir()
        script = script.replace(path, str(tmp_path / volume))
    for index, name in enumerate(names):
        for suffix in ("crt", "key"):
            (tmp_path / f"certificates/{name}.{suffix}").write_text(f"{name}.{suffix}")
            (tmp_path / f"certificates/{name}.{suffix}").chmod(0o440)
        (tmp_path / "certificates/ca.crt").write_text("ca")
        environ = {}
        for env in before["env"]:
            field = env.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            of_pod = f"{Path(kind).name}-{index}" if "name" in field else str(index)
            environ[env["name"]] = env.get("value", of_pod).replace("$(INDEX)", str(index))
        subprocess.run(["sh", "-c", script], env=environ, check=True, timeout=60)
        copied = {file.name: file.read_text() for file in (tmp_path / "tls").iterdir()}
        assert copied == {"ca.crt": "ca", "tls.crt": f"{name}.crt", "tls.key": f"{name}.key"}


def port_of(service: str) -> int:
    found = spec_of(SPARSE, "Service", service)
    assert found["clusterIP"] == "None"
    return int(found["ports"][0]["port"])


def test_servers_and_workers_find_their_scheduler():
    """Ports and names in arguments, services, probes and policies are the same."""
    pods = sparse_pods()
    scheduler, server, worker = (
        command_of(pods[name])[1]
        for name in ("parameter-scheduler", "parameter-server", "sparse-worker")
    )
    ports = {name: port_of(name) for name in ("parameter-scheduler", "parameter-server")}
    address = f"parameter-scheduler:{ports['parameter-scheduler']}"
    assert server["scheduler"] == worker["server"] == address
    assert scheduler["listen"] == f"0.0.0.0:{ports['parameter-scheduler']}"
    assert server["listen"] == f"0.0.0.0:{ports['parameter-server']}"
    for name, port in ports.items():
        (declared,) = pods[name]["ports"]
        assert declared["containerPort"] == port
        assert pods[name]["startupProbe"]["tcpSocket"]["port"] == port
    policies = specs(SPARSE, "NetworkPolicy")
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies
    rules = [r for p in policies for r in (*p.get("ingress", ()), *p.get("egress", ()))]
    assert all(rule.get("from") or rule.get("to") for rule in rules)
    allowed = {port["port"] for rule in rules for port in rule["ports"]}
    assert allowed == {*ports.values(), 53}


def test_servers_have_stable_names_and_volumes():
    """A server that comes back is found under its name, and finds its log."""
    container = sparse_pods()["parameter-server"]
    owner = spec_of(SPARSE, "StatefulSet", "parameter-server")
    values = {env["name"]: env for env in container["env"]}
    name, advertised = (f"{ENV_PREFIX}SERVER__{key}" for key in ("NAME", "ADVERTISED"))
    assert values[name]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert values[advertised]["value"] == f"$({name}).{owner['serviceName']}"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (claim,) = owner["volumeClaimTemplates"]
    _, server = command_of(container)
    assert server["data"] == mounts[claim["metadata"]["name"]]
    _, scheduler = command_of(sparse_pods()["parameter-scheduler"])
    assert scheduler["log"] is True
    assert scheduler["checkpoints"] == mounts["checkpoints"]
    grace_s = owner["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > ServerSettings().leave_s


@pytest.mark.parametrize(("name", "program"), JOBS)
def test_job_starts_no_pod_again_whose_status_is_final(name, program):
    """An index whose pod ends with a status that the table calls final, or that needs a correction,
    has failed at once. A pod that a drain has ended comes first, and is replaced."""
    job = spec_of(name, "Job")
    disrupted, final = job["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore"
    assert "onPodConditions" in disrupted
    (container,) = job["template"]["spec"]["containers"]
    codes = final["onExitCodes"]
    assert (final["action"], codes["operator"]) == ("FailIndex", "In")
    assert codes["containerName"] == container["name"]
    page = (KUBERNETES.parents[1] / "docs/operations.md").read_text(encoding="utf-8")
    told = {
        int(status)
        for status, of, again in re.findall(
            r"^\| (\d) \| (.*?) \| .* \| (.*) \|$", page, re.MULTILINE
        )
        if f"`{program}`" in of and status != "0" and again != "yes"
    }
    if program == "xain-participant sparse":
        told.remove(EXIT_FAILED)  # its scheduler may not answer yet
    assert {*codes["values"]} == told.union(FINAL)
    assert job["backoffLimitPerIndex"], "what FailIndex needs"


def test_sparse_job_has_as_many_workers_as_parts(monkeypatch):
    """A part is the completion index."""
    job = spec_of(SPARSE, "Job")
    container = sparse_pods()["sparse-worker"]
    for env in container["env"]:
        monkeypatch.setenv(env["name"], env.get("value", "2"))
    _, worker = command_of(container)
    assert (worker["index"], worker["workers"]) == (2, job["completions"])
    assert job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "rows"]
    assert Path(worker["data"]).parent == Path(mount["mountPath"])
    before, _ = job["template"]["spec"]["initContainers"]
    assert worker["data"] in before["command"][-1]
