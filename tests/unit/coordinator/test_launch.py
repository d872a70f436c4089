"""Launches without a training: workers and their data, settings, commands, processes, the log."""

import fcntl
import os
import re
from pathlib import Path

import pytest

from xain_coordinator.cli.launch import cli, containers, plan, processes, sparse
from xain_coordinator.cli.launch.logs import LogView
from xain_coordinator.cli.launch.plan import Program, Worker, find_workers
from xain_coordinator.cli.launch.work_folder import hold, is_held
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.sections.launch import LaunchSettings
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.settings.settings import ConfigError, resolve


def folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir()
        (root / name / "X_train.csv").write_text("a,b\n1,2\n")
        (root / name / "y_train.csv").write_text("y\n0\n")
    return root


def test_each_folder_of_the_data_is_a_worker(tmp_path):
    """Other folders and files beside them are passed over."""
    root = folder(tmp_path, "ward-2", "ward-1")
    (root / "notes").mkdir()
    (root / "README.txt").touch()
    found = find_workers(str(root), LaunchSettings())
    assert found == (Worker("ward-1", str(root / "ward-1")), Worker("ward-2", str(root / "ward-2")))


def test_chosen_folders_in_the_order_of_their_names(tmp_path):
    root = folder(tmp_path, "a", "b", "c")
    found = find_workers(str(root), LaunchSettings(names=("c", "a"), cpu_shares=(2, 512)))
    assert [(w.name, w.cpu_shares) for w in found] == [("c", 2), ("a", 512)]
    found = find_workers(str(root), LaunchSettings(workers=2, cpu_shares=(7,)))
    assert [(w.name, w.cpu_shares) for w in found] == [("a", 7), ("b", 7)]


@pytest.mark.parametrize("number", [None, 2])
def test_one_data_set_is_divided(tmp_path, number):
    """A bundled set, a file and one folder with both files alike."""
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    for data in ("digits", str(tmp_path / "x.csv"), str(folder(tmp_path, "w") / "w")):
        found = find_workers(data, LaunchSettings(workers=number))
        assert [w.part for w in found] == [(i, number or 3) for i in range(number or 3)]
        assert {w.source for w in found} == {data}


def test_stages_of_a_network_have_all_rows():
    found = find_workers("digits", LaunchSettings(workers=2), divided=False)
    assert [worker.part for worker in found] == [None, None]


def test_wrong_data_are_told_in_one_line(tmp_path):
    def told(data, **settings):
        with pytest.raises(CommandFailed) as caught:
            find_workers(data, LaunchSettings.model_validate(settings))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "there is no such file or folder" in told(str(tmp_path / "nowhere"))
    assert "no folder in it has X_train.csv" in told(str(tmp_path))
    root = folder(tmp_path, "a", "b")
    assert "has 2 folders with X_train.csv: a, b" in told(str(root), workers=3)
    assert "launch.names has 'c'" in told(str(root), names=("c",))
    assert "launch.cpu_shares has 3 numbers for 2 workers" in told(str(root), cpu_shares=(2, 3, 4))
    (root / "a" / "y_train.csv").unlink()
    assert f"{root / 'a' / 'y_train.csv'}: there is no such file" in told(str(root))
    (root / "b" / "X_train.csv").unlink()
    (root / "a").rename(root / "coordinator")
    (root / "coordinator" / "y_train.csv").touch()
    assert "it is the coordinator's name" in told(str(root))
    (root / "x.txt").touch()
    assert "one of: .csv" in told(str(root / "x.txt"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launch.name": "A b"}, 'launch.name is "A b"; it must be a name of at most 40'),
        ({"launch.names": "a,b,a"}, "two workers have the same name"),
        ({"launch.names": "coordinator"}, "it is the coordinator's name"),
        ({"launch.names": "a,b", "launch.workers": "3"}, "launch.names has 2 names"),
        ({"launch.cpu_shares": "[1]"}, "all must be at least 2"),
        ({"launch.cpu_shares": "much"}, "it must be a whole number, or a list of whole numbers"),
        ({"launch.ports": "8080"}, "the port of gRPC, and the port of HTTP"),
        ({"launch.ports": "8080,8080"}, "gRPC and HTTP need different ports"),
        ({"launch.num_gpus": "1.5"}, "launch.num_gpus is 1.5; above 1 it must be a whole number"),
        ({"launch.workers": "0"}, "launch.workers is 0; it must be a whole number, at least 1"),
    ],
)
def test_wrong_settings_are_told_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(CoordinatorConfig, None, "", settings)


def test_chimeras_variables_are_read():
    """Lists are Python literals there. Its ports of workers have no counterpart."""
    environ = {
        "CHIMERA_NETWORK_NAME": "chimera-network",
        "CHIMERA_NETWORK_PREFIX": "10.1.2",
        "CHIMERA_WORKERS_NODES_NAMES": "['a', 'b']",
        "CHIMERA_WORKERS_CPU_SHARES": "[2, 4]",
        "CHIMERA_WORKERS_HOST": "0.0.0.0",
        "CHIMERA_WORKERS_MAPPED_PORTS": "[101, 102]",
        "CHIMERA_WORKERS_ENDPOINTS_MAX_RETRIES": "2",
        "CHIMERA_WORKERS_ENDPOINTS_TIMEOUT": "7.5",
    }
    values = plan.chimera_defaults(environ)
    launch = resolve(CoordinatorConfig, None, "", {}, lambda _: values).config.launch
    assert (launch.network_name, launch.subnet) == ("chimera-network", "10.1.2.0/24")
    assert (launch.names, launch.cpu_shares, launch.host) == (("a", "b"), (2, 4), "0.0.0.0")
    assert (launch.max_retries, launch.timeout_s) == (2, 7.5)
    assert plan.fleet_defaults(["a"], launch, serve=False)["predict.timeout_s"] == 7.5
    assert plan.chimera_defaults({}) == {}
    with pytest.raises(CommandFailed, match="CHIMERA_WORKERS_NODES_NAMES is no list"):
        plan.chimera_defaults({"CHIMERA_WORKERS_NODES_NAMES": "[a"})


def test_defaults_yield_to_everything_that_is_given(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[launch]\nhost = "::1"\n[workload]\nname = "bagging"\n')
    given = {}

    def defaults(told):
        given.update(told)
        return {"launch.host": "0.0.0.0", "rounds.rounds": 3, **plan.workload_defaults(told)}

    config = resolve(CoordinatorConfig, file, "", {"rounds.rounds": "5"}, defaults).config
    assert given == {"launch.host": "::1", "workload.name": "bagging", "rounds.rounds": 5}
    assert (config.launch.host, config.rounds.rounds) == ("::1", 5)
    assert config.aggregation.rule == "ensemble"
    assert config.workload.options == {"publish": True}


@pytest.mark.parametrize(
    ("kind", "serve", "http", "is_published"),
    [
        ("process", True, {}, True),
        ("docker", False, {}, True),
        ("docker", True, {}, False),
        ("docker", False, {"http.port": "8080"}, False),
    ],
)
def test_containers_that_serve_ask_participants_for_predictions(kind, serve, http, is_published):
    """The coordinator's image has no scikit-learn to predict with published estimators."""
    given = {"workload.name": "bagging", **http}
    _, _, values = cli._resolve(None, "iris", given, kind, serve=serve)
    assert values.get("workload.options.publish", False) is is_published
    chosen = {**given, "workload.options.publish": "true"}
    config, _, _ = cli._resolve(None, "iris", chosen, kind, serve=serve)
    assert config.workload.options["publish"] is True


def test_work_folder_is_held_until_its_launcher_lets_go(tmp_path):
    """A folder that is gone is not held."""
    held = hold(tmp_path)
    assert fcntl.fcntl(held, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR, "NFS locks nothing else"
    with pytest.raises(BlockingIOError):
        hold(tmp_path)
    assert is_held(tmp_path)
    os.close(held)
    assert not is_held(tmp_path)
    assert not is_held(tmp_path / "gone")


def test_log_of_a_restarted_program_keeps_its_earlier_lines(tmp_path):
    backend = processes.ProcessBackend("127.0.0.1")
    (tmp_path / "logs").mkdir()
    backend.prepare(tmp_path)
    lines = []
    for _ in range(2):
        process = backend.start(Program("coordinator", ["--version"]))
        process.remove(60.0)
        assert process.status() == 0
        lines.append(process.new_lines())
        assert process.new_lines() == []
    assert lines[0] == lines[1] != []
    assert (tmp_path / "logs/coordinator.log").read_text().splitlines() == lines[0] + lines[1]


def test_log_shows_the_name_before_each_line(capsys):
    entry = '{"timestamp": "2026-11-22T18:00:00Z", "level": "info", "event": "joined", "n": 1}'
    failed = '{"timestamp": "2026-11-22T18:00:00Z", "level": "error", "event": "x", "exception": '
    view = LogView(["a", "ward"], colors=False)
    view.show("a", [entry, "plain text", "{no JSON", "7"])
    view.show("ward", [failed + '"Traceback\\n  ..."}'])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a    \| \d\d-\d\d \d\d:\d\d:00 joined             n=1", lines[0])
    assert lines[1:4] == ["a    | plain text", "a    | {no JSON", "a    | 7"]
    assert "error: x" in lines[4]
    assert lines[5:] == ["ward | Traceback", "ward |   ..."]
    LogView(["a"], colors=True).show("a", ["hello"])
    assert capsys.readouterr().out == "\x1b[36ma |\x1b[0m hello\n"
    LogView(["a"], colors=True, is_quiet=True).show("a", ["hello"])
    assert capsys.readouterr().out == ""


SGD = ["--data=iris", "--workload=sgd"]
SPARSE = ["--workload=sparse", "--data=."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SGD, f"--work={os.devnull}/work"], f"{os.devnull}/work: Not a directory"),
        ([], "the workers have no data; add --data"),
        (["--data=iris"], "there is nothing to train; add --workload"),
        ([*SGD, "--with=vm"], "--with takes process, docker or ray"),
        ([*SGD, "--workers=many"], 'launch.workers is "many"; it must be a whole number'),
        (["--data=iris", "--workload=sdg"], "workload.name is"),
        (["--data=iris", "--worker-set=seed"], "--worker-set takes KEY=VALUE"),
        (["--data=nowhere", "--workload=sgd"], "there is no such file or folder"),
        ([*SGD, "--set=launch.cpu_shares=2,3"], "launch.cpu_shares has 2 numbers for 3 workers"),
        *[
            ([*SGD, flag], "is not for --workload sgd")
            for flag in ("--servers=2", "--replicas=1", "--test=x")
        ],
        (["--workload=sparse", "--data=nowhere"], "--data nowhere: there is no such file or"),
        ([*SPARSE, "--test=nowhere"], "--test nowhere: there is no such file or folder"),
        ([*SPARSE, "--rounds=3"], "--rounds is not for --workload sparse"),
        ([*SPARSE, "--serve"], "--serve is not for --workload sparse"),
        ([*SPARSE, "--servers=0"], "launch.servers is 0; it must be a whole number, at least 1"),
        ([*SPARSE, "--replicas=many"], 'scheduler.replicas is "many"; it must be a whole'),
        ([*SPARSE, "--set=rounds.rounds=3"], "unknown key rounds.rounds"),
        ([*SPARSE, "--worker-set=data.target=x"], "--worker-set has 'data.target'; sparse"),
        ([*SPARSE, "--set=launch.names=a,score"], "launch.names has 'score', which another"),
        ([*SPARSE, "--with=ray"], "--with ray is not for --workload sparse"),
        ([*SPARSE, "--with=vm"], "--with takes process, docker or ray"),
    ],
)
def test_wrong_command_lines_are_told_in_one_line(capsys, arguments, message):
    assert cli.main(arguments) == (1 if message.endswith("Not a directory") else 2)
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1


def sparse_request(folder: Path, data: str, **values: str) -> sparse.Request:
    resolved = resolve(sparse.SparseConfig, None, "", values)
    return sparse.plan(resolved, data, "", folder, {"model": "fm"})


def test_sparse_workers_divide_one_source(tmp_path):
    """Local paths are absolute, patterns and URLs may be what they are."""
    values = {"launch.workers": "2", "launch.servers": "3", "launch.cpu_shares": "7"}
    request = sparse_request(tmp_path, "s3://rows/*.svm", **values)
    assert request.workers == tuple(
        Worker(f"worker-{i + 1}", "s3://rows/*.svm", (i, 2), 7) for i in range(2)
    )
    assert request.servers == ("server-1", "server-2", "server-3")
    assert request.table == "fm"
    assert request.values == {}
    (worker, *_) = sparse_request(tmp_path, "rows/*.svm", **{"scheduler.log": "true"}).workers
    assert worker.source == str(Path.cwd() / "rows/*.svm")


@pytest.mark.parametrize(
    ("source", "mounted", "inside"),
    [
        ("digits", None, "digits"),
        ("s3://rows/*.svm", None, "s3://rows/*.svm"),
        ("ROOT/w", "ROOT/w", "/data"),
        ("ROOT/w/X_train.csv", "ROOT/w/X_train.csv", "/data/X_train.csv"),
        ("ROOT/w/*.csv", "ROOT/w", "/data/*.csv"),
        ("ROOT/*/part-?/x.svm", "ROOT", "/data/*/part-?/x.svm"),
    ],
)
def test_containers_mount_the_data_of_their_program(tmp_path, source, mounted, inside):
    root = str(folder(tmp_path, "w"))
    path = None if mounted is None else Path(mounted.replace("ROOT", root))
    assert containers._mounted(source.replace("ROOT", root), 0) == (path, inside)


def test_wrong_variable_of_chimera_is_a_wrong_setting(monkeypatch, capsys):
    monkeypatch.setenv("CHIMERA_WORKERS_NODES_NAMES", "[a")
    assert cli.main(["--data=iris", "--workload=sgd"]) == 2
    assert "CHIMERA_WORKERS_NODES_NAMES is no list" in capsys.readouterr().err
