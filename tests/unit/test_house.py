"""The walls of the house: which distribution, and which room, may know which."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import pytest

from support.trees import nodes_of, tree_of

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    "protos": "xain_wire",
    "foundation": "xain_foundation",
    "membership": "xain_membership",
    "messaging": "xain_messaging",
    "workloads": "xain_workloads",
    "parameters": "xain_parameters",
    "coordinator": "xain_coordinator",
    "participant": "xain_participant",
    "session": "xain_session",
}
SCRIPTS = "xain"  # the package for scripts, in the distribution of the participant
# What the core may import beside itself: no I/O, no clock, no threads.
CORE_MAY_KNOW = {
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "itertools",
    "math",
    "random",
    "re",
    "statistics",
    "typing",
    "xain_foundation.clock_table",
    "xain_foundation.settings.hints",
    "xain_foundation.conditional_events",
    "xain_foundation.names",
    "xain_foundation.settings.tags",
    "xain_wire.fl.refusals_pb2",
    "xain_wire.refusal",
    "xain_wire.metadata",
    "xain_workloads.measures.calibration",
    "xain_workloads.tables.checks.findings",
    "xain_workloads.tables.division",
    "xain_workloads.errors",
    "xain_workloads.measures.figures",
    "xain_workloads.comparing.gains",
    "xain_workloads.comparing.importance",
    "xain_workloads.model",
    "xain_workloads.passes",
    "xain_workloads.tables.profile",
    "xain_workloads.tables.schema",
    "xain_workloads.measures.tallies",
    "xain_workloads.tables.statistics",
    "xain_workloads.tables.reading.statistics_json",
    "xain_workloads.measures.thresholds",
}
# What is installed under another name than it is imported by.
INSTALLED_AS = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "mlflow": "mlflow-skinny",
    "sklearn": "scikit-learn",
    "xgboost": "xgboost-cpu",
    "zmq": "pyzmq",
}
# Imported by fsspec for the schemes of URLs, and by no other module.
PLUGINS = {"aiohttp", "hdfs-native", "s3fs"}


MAX_MODULES = 13  # of a folder


def imports(folder: Path) -> Iterator[tuple[Path, str]]:
    """(file, imported module) of every import below a folder; a module that is imported from its
    package counts as that module."""
    files = list(folder.rglob("*.py"))
    assert files, f"{folder} is empty"
    for file in files:
        yield from ((file, module) for module in imported_by(file))


@cache
def imported_by(file: Path) -> tuple[str, ...]:
    """The modules that a file imports."""
    found: list[str] = []
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            assert node.module
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append(name if is_module(name) else node.module)
    return tuple(found)


@cache
def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package of ours."""
    files = [ROOT / one / "src" / Path(*name.split(".")) for one in DISTRIBUTIONS]
    return any(file.is_dir() or file.with_suffix(".py").is_file() for file in files)


def arrows(heading: str) -> dict[str, set[str]]:
    """For each node of a flowchart of docs/architecture.md, the nodes that its arrows lead to."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    chart = (
        page.partition(f"\n## {heading}\n")[2].partition("flowchart TD\n")[2].partition("```")[0]
    )
    found: dict[str, set[str]] = {node: set() for node in re.findall(r"^ +(\w+)\[", chart, re.M)}
    for line in chart.splitlines():
        for one, other in pairwise(line.strip().split(" --> ")):
            found[one].add(other)
    return found


def below(node: str, arrows: dict[str, set[str]]) -> set[str]:
    """All nodes that paths of arrows lead to."""
    return arrows[node].union(*(below(other, arrows) for other in arrows[node]))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_import_along_the_arrows(name):
    """No distribution imports one that the diagram does not show below it."""
    chart = arrows("Distributions")
    assert chart.keys() == DISTRIBUTIONS.keys()
    known = {DISTRIBUTIONS[one] for one in below(name, chart)}
    for file, module in imports(ROOT / name / "src"):
        allowed = known | {DISTRIBUTIONS[name]}
        if SCRIPTS in file.parts:  # which only the session imports
            allowed |= {SCRIPTS, DISTRIBUTIONS["session"]}
        if name == "session":
            allowed |= {SCRIPTS}
        top = module.partition(".")[0]
        is_ours = top == SCRIPTS or top.startswith("xain_")
        assert not is_ours or top in allowed, f"{file} imports {module}"


def test_messaging_is_a_guest():
    """Programs of others send messages with it, and no other distribution knows it."""
    for name in DISTRIBUTIONS.keys() - {"messaging"}:
        for file, module in imports(ROOT / name / "src"):
            assert module.partition(".")[0] != "xain_messaging", file


def imported_rooms(name: str) -> dict[str, set[str]]:
    """For each room of a distribution, the other rooms of it that it imports from.

    A folder of the package is a room, and so is a file beside the folders.
    """
    package = ROOT / name / "src" / DISTRIBUTIONS[name]
    rooms: dict[str, set[str]] = {}
    for file, module in imports(package):
        top, *path = module.split(".")
        if top == DISTRIBUTIONS[name]:
            importing = file.relative_to(package).with_suffix("").parts[0]
            imported = path[0] if path else "__init__"
            if imported != importing:
                rooms.setdefault(importing, set()).add(imported)
    return rooms


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_rooms_import_each_other_in_a_circle(name):
    """Rooms without their imports are taken away until none is left; a circle would stay."""
    rooms = imported_rooms(name)
    while leaves := {one for one in rooms if not rooms[one] & rooms.keys()}:
        rooms = {one: imported for one, imported in rooms.items() if one not in leaves}
    assert not rooms


def packages(name: str) -> dict[str, Path]:
    """The packages of a distribution, by their whole names."""
    top = ROOT / name / "src"
    files = (top / DISTRIBUTIONS[name]).rglob("__init__.py")
    return {".".join(file.parent.relative_to(top).parts): file.parent for file in files}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_folder_has_more_than_13_modules(name):
    """A reader of `ls` sees at once what there is."""
    for folder in packages(name).values():
        modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
        modules = {one for one in modules if not one.endswith(("_pb2", "_pb2_grpc"))}
        assert len(modules) <= MAX_MODULES, folder


def siblings(name: str) -> Iterator[tuple[str, Path, set[str]]]:
    """(package, its folder, its members) for the folders in each package, and for the files."""
    known = packages(name)
    for parent, folder in known.items():
        yield parent, folder, {one for one in known if one.rpartition(".")[0] == parent}
        yield parent, folder, {f"{parent}.{file.stem}" for file in folder.glob("[!_]*.py")}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_sibling_folders_or_files_import_each_other_in_a_circle(name):
    for parent, folder, members in siblings(name):
        rooms = {one: set() for one in members}
        for file, module in imports(folder):
            inside = file.relative_to(folder).with_suffix("").parts[0]
            importing = f"{parent}.{inside}"
            imported = ".".join(module.split(".")[: parent.count(".") + 2])
            if {importing, imported} <= members and importing != imported:
                rooms[importing].add(imported)
        while leaves := {one for one in rooms if not rooms[one] & rooms.keys()}:
            rooms = {one: imported for one, imported in rooms.items() if one not in leaves}
        assert not rooms, parent


def test_folders_of_the_coordinator_import_along_the_arrows():
    """The diagram has every folder, each of its arrows is an import, and every import is below."""
    chart = arrows("Folders of the coordinator")
    package = ROOT / "coordinator/src/xain_coordinator"
    assert chart.keys() == {file.parent.name for file in package.glob("*/__init__.py")} | {"ports"}
    rooms = imported_rooms("coordinator")
    for room, others in chart.items():
        assert others <= rooms.get(room, set()) <= below(room, chart), room
    assert "stores" not in rooms["config"]  # configuration imports no adapter


def test_the_readme_maps_every_folder():
    """Where things are: the top-level folders that git tracks, and no others."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    mapped = re.findall(r"^    ([a-z.]+)/  ", readme.partition("## Where things are")[2], re.M)
    tracked = subprocess.run(
        ["git", "ls-tree", "-d", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, check=True
    )
    assert sorted(mapped) == sorted(tracked.stdout.decode().split())


def test_no_file_of_the_coordinator_lies_loose():
    package = ROOT / "coordinator/src/xain_coordinator"
    assert {file.stem for file in package.glob("*.py")} == {"__init__", "__main__", "ports"}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_declared_dependencies_are_the_imported_ones(name):
    """A package that comes along with another dependency may go with it."""
    project = tomllib.loads((ROOT / name / "pyproject.toml").read_text(encoding="utf-8"))
    optional = project["project"].get("optional-dependencies", {}).values()
    declared = {
        re.split(r"[\[<>=]", one)[0] for one in chain(project["project"]["dependencies"], *optional)
    }
    imported = set()
    for _, module in imports(ROOT / name / "src"):
        top = ".".join(module.split(".")[: 2 if module.startswith("google.") else 1])
        ours = (DISTRIBUTIONS[name], SCRIPTS, DISTRIBUTIONS["session"])  # that one if it is there
        if top not in sys.stdlib_module_names and top not in ours:
            imported.add(INSTALLED_AS.get(top, top.replace("_", "-")))
    assert imported == declared - PLUGINS


def test_workloads_know_no_network():
    """Machine learning is pure: it can be tested, and trusted, without a socket."""
    for file, module in imports(ROOT / "workloads" / "src"):
        assert module.partition(".")[0] not in {"grpc", "socket", "http", "urllib"}, file


def test_the_core_touches_nothing():
    """The decider has no I/O, no clock and no threads: its imports are a short list."""
    for file, module in imports(ROOT / "coordinator/src/xain_coordinator/core"):
        known = module.startswith("xain_coordinator.core") or any(
            module == name or module.startswith(f"{name}.") for name in CORE_MAY_KNOW
        )
        assert known, f"{file} imports {module}"


# State that belongs to a process as a whole: signal handlers, exception hooks, the environment,
# warnings, floating-point errors, garbage collection, thread switching, the root logger and the
# standard streams.
OF_THE_PROCESS = re.compile(
    r"signal\.signal|(sys|threading)\.excepthook|sys\.set\w+|gc\.\w+|os\.(chdir|umask|nice|putenv)"
    r"|resource\.setrlimit|warnings\.(filterwarnings|simplefilter)|np\.seterr"
    r"|logging\.(basicConfig|root|captureWarnings|disable)|logging\.getLogger\(\)"
    r"|setattr\(sys, .+\)"
    r"|.*\.add(Filter|Handler)|os\.environ\[.*|os\.environ\.(setdefault|update|pop|clear)"
)
MAY_CHANGE_THE_PROCESS = {
    # Commands, and what they call.
    "coordinator/src/xain_coordinator/cli/launch/interrupts.py",
    "coordinator/src/xain_coordinator/process/run.py",
    "foundation/src/xain_foundation/commands.py",
    "foundation/src/xain_foundation/logs/logs.py",
    "foundation/src/xain_foundation/logs/streams.py",
    "foundation/src/xain_foundation/net/sockets.py",
    "parameters/src/xain_parameters/cli.py",
    "participant/src/xain_participant/agent/signals.py",
    "participant/src/xain_participant/sparse/sparse_cli.py",
    # Processes that the SDK starts, and the environment that they inherit.
    "session/src/xain_session/simulation/local.py",
    "participant/src/xain_participant/stages/stage_process.py",
    # The thread switching of a process in which a coordinator runs beside the script.
    "session/src/xain_session/deployments.py",
    # Ctrl-C while a session ends, after which the handler of before is there again.
    "session/src/xain_session/stopping.py",
    # The variable that docs/pytorch.md names.
    "participant/src/xain/__init__.py",
    # A filter of gRPC's logger, which is there once however many servers there are.
    "coordinator/src/xain_coordinator/server/serve.py",
    # A thread of low priority, and numpy's error state in a context of its own.
    "coordinator/src/xain_coordinator/server/weights/weights_port.py",
    "parameters/src/xain_parameters/tables/part.py",
}


def changes_of_the_process(file: Path) -> Iterator[str]:
    """The expressions of a file that OF_THE_PROCESS finds, with their lines."""
    for node in nodes_of(file):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            continue  # it only reads
        if isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            text = ast.unparse(node)
            if OF_THE_PROCESS.fullmatch(text):
                yield f"{file.relative_to(ROOT)}:{node.lineno}: {text}"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_libraries_leave_their_process_alone(name):
    """Programs change the state of their process, and the modules that they import do not."""
    for file in (ROOT / name / "src").rglob("*.py"):
        if file.relative_to(ROOT).as_posix() not in MAY_CHANGE_THE_PROCESS:
            assert not list(changes_of_the_process(file))


def test_no_file_is_excused_that_changes_nothing_of_the_process():
    assert all(list(changes_of_the_process(ROOT / name)) for name in MAY_CHANGE_THE_PROCESS)


def test_every_channel_and_proxy_is_of_foundation():
    """There is one rule about targets and proxies."""
    makes_channels = re.compile(
        r"\b(in)?secure_channel\(|\bgetproxies\(|\bproxy_bypass\(|environ.*_proxy\b", re.IGNORECASE
    )
    found = {
        file.name
        for name in DISTRIBUTIONS
        for file in (ROOT / name / "src").rglob("*.py")
        if "_pb2" not in file.name and makes_channels.search(file.read_text(encoding="utf-8"))
    }
    assert found == {"channels.py"}


def test_nothing_unpickles():
    """No code in data: nothing here can run what it reads."""
    for name in DISTRIBUTIONS:
        for file, module in imports(ROOT / name / "src"):
            assert module.partition(".")[0] not in {"pickle", "dill", "joblib", "shelve"}, file
        for file in (ROOT / name / "src").rglob("*.py"):
            for node in nodes_of(file):
                if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                    assert isinstance(node.value, ast.Constant), file
                    assert node.value.value is False, f"{file}:{node.value.lineno}"
                if isinstance(node, ast.Name):
                    assert node.id not in {"eval", "exec"}, f"{file}:{node.lineno}"


@pytest.mark.parametrize(("page", "least"), [("reliability.md", 40), ("mistakes.md", 30)])
def test_every_test_that_the_docs_name_exists(page, least):
    """A list of promises or of mistakes is only worth something if the tests in it are there."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`([a-z0-9_/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > least
    for file, test in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not test or re.search(rf"\bdef {test}\(", source), f"{file} has no {test}"


def test_every_file_on_the_way_of_an_update_exists():
    """The page that follows an update names files of the coordinator."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_]+/[a-z0-9_]+\.py)`", text))
    assert len(named) > 20
    for file in named:
        assert (ROOT / "coordinator/src/xain_coordinator" / file).is_file(), file


MAY_BE_PATCHED = {
    "VERSION",  # of the parameter server's protocol: a test needs another one
    # Bounds of messaging.
    "ABORT_S",
    "CALL_TIMEOUT_S",
    "GATHER_FOR_EACH_S",
    "KEEPALIVE",
    "LONGEST_S",
    "LOOK_S",
    "MAX_ENVELOPE_BYTES",
    "MAX_MEMBERS",
}
# Patches of "module.CONSTANT", of an attribute CONSTANT, and of a key of a CONSTANT.
PATCHED_CONSTANT = re.compile(
    r'"xain_[\w.{}]+\.(_?[A-Z][A-Z0-9_]+)"'
    r'|(?:setattr|patch\.object)\(\s*[\w.]+,\s*"(_?[A-Z][A-Z0-9_]+)"'
    r"|setitem\((?:\w+\.)*(_?[A-Z][A-Z0-9_]+)\b"
)


def test_tests_patch_no_constants():
    """A bound that a test needs smaller is an argument, or an attribute of its object."""
    for file in (ROOT / "tests").rglob("*.py"):
        for found in PATCHED_CONSTANT.finditer(file.read_text(encoding="utf-8")):
            assert found[found.lastindex or 0] in MAY_BE_PATCHED, f"{file}: {found[0]}"


# The simulation's points lie an hour back: no test of it compares them with now.
MAY_READ_A_CLOCK = {"test_metrics_store.py"}
READS_A_CLOCK = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "now", "utcnow"}


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.Call]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _run_at_import(statement.body)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (each for each in ast.walk(statement) if isinstance(each, ast.Call))


def test_no_test_reads_a_clock_when_it_is_imported():
    """A module's tests may run many minutes after pytest has imported it."""
    for file in (ROOT / "tests").rglob("*.py"):
        for call in _run_at_import(tree_of(file).body):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if file.name not in MAY_READ_A_CLOCK:
                assert name not in READS_A_CLOCK, f"{file}:{call.lineno}"
