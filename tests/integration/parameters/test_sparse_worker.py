"""Workers that train sparse models together, on servers with real sockets."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from support.process import ran
from xain_parameters import Invalid, LocalGroup
from xain_parameters.client.batches import MAX_PARTS
from xain_participant.sparse.sparse_worker import Job, Progress, Score, score, train
from xain_workloads.errors import DataError
from xain_workloads.sparse.generator import SHAPES, write
from xain_workloads.sparse.models import FactorisationMachine, LogisticRegression
from xain_workloads.sparse.rows import Source

SCALE = 4e-5
MODELS = {"logistic": LogisticRegression(1e-5), "fm": FactorisationMachine(4, 1e-5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the shape of kdd12: train.svm, and as many in test.svm."""
    made = tmp_path_factory.mktemp("rows")
    shape = SHAPES["kdd12"].scaled(SCALE)
    write(made / "train.svm", shape, 1, 0, 2)
    write(made / "test.svm", shape, 1, 1, 2)
    return made


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    with LocalGroup(shards=2) as made:
        yield made


def work(
    group: LocalGroup, folder: Path, job: Job, rank: int = 0, workers: int = 1
) -> list[Progress]:
    reports = []
    source = Source(str(folder / "train.svm"))
    with group.connect(f"w{rank}", workers=workers, rank=rank) as server:
        outcome = train(server, job, source, reports.append, 0)
    assert outcome.is_whole
    assert outcome.num_batches == len(reports)
    return reports


def together(group: LocalGroup, folder: Path, job: Job, workers: int) -> list[list[Progress]]:
    with ThreadPoolExecutor(workers) as threads:
        return list(
            threads.map(lambda rank: work(group, folder, job, rank, workers), range(workers))
        )


def scored(group: LocalGroup, folder: Path, job: Job) -> Score:
    with group.connect("scorer") as server:
        return score(server, job, Source(str(folder / "test.svm")))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("staleness", [0, 2, None])
def test_three_workers_reach_the_loss_of_one(group, folder, name, staleness):
    """On rows that none of them has seen, clearly better than chance."""
    job = Job(name, MODELS[name], staleness=staleness, batch_rows=100, num_epochs=4)
    single = work(group, folder, replace(job, table="alone"))
    reports = together(group, folder, job, 3)
    assert sum(each.num_rows for each in chain(*reports)) == sum(each.num_rows for each in single)
    one = scored(group, folder, replace(job, table="alone"))
    three = scored(group, folder, job)
    assert three.auc > 0.8
    assert three.accuracy > 0.7
    assert three.loss < one.loss + 0.02
    for worker in reports:
        assert worker[-1].loss < worker[0].loss


def alone(
    group: LocalGroup, folder: Path, job: Job, name: str | None = None
) -> tuple[list[Progress], Score]:
    """Train with one worker, which sees all of its pushes when it scores at its end."""
    reports = []
    with group.connect("w0", job=name) as server:
        train(server, job, Source(str(folder / "train.svm")), reports.append, 0)
        return reports, score(server, job, Source(str(folder / "test.svm")))


def test_worker_without_rows_holds_no_other_back(group, tmp_path):
    """The others wait for three workers, of which one has a part without a line."""
    (tmp_path / "train.svm").write_text("1 1:1" + 60 * " " + "\n0 2:1\n")
    job = Job("t", MODELS["logistic"], batch_rows=1, num_epochs=2)
    reports = together(group, tmp_path, job, 3)
    assert sorted(len(each) for each in reports) == [0, 2, 2]


def run(group: LocalGroup, *words: str) -> "subprocess.CompletedProcess[str]":
    return ran("-m", "xain_participant", "sparse", f"--server={group.target}", *words)


def test_worker_process_without_rows_warns_and_has_a_status_of_its_own(group, tmp_path):
    """Two workers divide one row. Started again, when all is read, they end well."""
    (tmp_path / "train.svm").write_text("1 1:1\n")
    words = [f"--data={tmp_path / 'train.svm'}", "--workers=2", "--epochs=2"]

    def start(worker: str) -> "subprocess.CompletedProcess[str]":
        return run(group, f"--worker={worker}", *words)

    with ThreadPoolExecutor(2) as threads:
        idle, busy = sorted(threads.map(start, "ab"), key=lambda each: -each.returncode)
        again = list(threads.map(start, "ab"))
    assert (busy.returncode, idle.returncode) == (0, 5), idle.stderr
    assert '"no_batches"' in idle.stderr
    assert "no_batches" not in busy.stderr
    assert [each.returncode for each in again] == [0, 0]


def test_rows_that_change_while_they_are_read_have_a_status_of_their_own(group, tmp_path):
    """A row becomes a comment of as many bytes before the second epoch."""
    path = tmp_path / "train.svm"
    path.write_text("1 1:1\n0 2:1\n")
    words = [f"--data={path}", f"--test={path}"]
    assert run(group, *words, "--epochs=1").returncode == 0
    path.write_text("1 1:1\n#0 2:\n")
    done = run(group, *words, "--epochs=2")
    assert done.returncode == 7, done.stderr
    assert '"rows_missed"' in done.stderr
    assert "log loss" in done.stdout


def test_workers_without_an_index_divide_the_rows(group, folder):
    """Three processes by one command; the one of rank 0 scores the model at the end."""
    data, test = folder / "train.svm", folder / "test.svm"
    words = [f"--data={data}", f"--test={test}", "--workers=3", "--batch=100", "--epochs=2"]
    with ThreadPoolExecutor(3) as threads:
        ended = list(threads.map(lambda _: run(group, *words), range(3)))
    assert [each.returncode for each in ended] == [0, 0, 0], [each.stderr for each in ended]
    assert sum("log loss" in each.stdout for each in ended) == 1
    num_rows = len(data.read_text().splitlines())
    with group.connect("reader") as reader:
        notes = reader.find("logistic.parts")
        keys = [[epoch * MAX_PARTS + part for part in range(3)] for epoch in range(2)]
        assert notes.pull(keys)[..., 6].sum(axis=1).tolist() == [num_rows] * 2


def test_training_goes_on_with_its_batches_after_another_model_was_trained(group, folder):
    job = Job("a", MODELS["logistic"], batch_rows=100)
    assert len(work(group, folder, job)) == 30
    assert len(work(group, folder, replace(job, table="b", num_epochs=2))) == 60
    assert len(work(group, folder, replace(job, num_epochs=3))) == 60
    whole, expected = alone(group, folder, replace(job, table="whole", num_epochs=3))
    assert len(whole) == 90
    assert scored(group, folder, job) == expected


def test_targets_that_are_no_classes_are_refused(group, tmp_path):
    (tmp_path / "train.svm").write_text("1 3:1\n2 4:1\n")
    with pytest.raises(DataError, match="there is a 2"):
        work(group, tmp_path, Job("t", MODELS["logistic"]))


def test_model_that_is_not_there_cannot_be_scored(group, folder):
    with pytest.raises(Invalid, match="no table 'nowhere'; there are: none"):
        scored(group, folder, Job("nowhere", MODELS["logistic"]))
    work(group, folder, Job("t", MODELS["logistic"]))
    with pytest.raises(DataError, match="rows of 5 values"):
        scored(group, folder, Job("t", MODELS["fm"]))


def test_model_is_scored_after_its_columns_were_forgotten(group, folder):
    """A rollback to the beginning empties the note of them, and the workers read on."""
    work(group, folder, Job("t", MODELS["logistic"]))
    with group.connect("eraser") as server:
        server.find("t.rows").push([0], [[0.0, 0.0]])
    assert scored(group, folder, Job("t", MODELS["logistic"])).num_rows > 0


def test_longer_training_reads_the_further_epochs(group, tmp_path):
    """Workers of the first training were done with one epoch."""
    (tmp_path / "train.svm").write_text("".join(f"{i % 2} {i % 7}:1\n" for i in range(30)))
    job = Job("t", MODELS["logistic"], batch_rows=1)
    for num_epochs, num_batches in ((1, 30), (2, 30), (2, 0)):
        reports = together(group, tmp_path, replace(job, num_epochs=num_epochs), 2)
        assert sum(map(len, reports)) == num_batches


def test_workers_with_different_sources_are_refused(group, tmp_path):
    """Their parts would not have each row once: a file with a row more, or other batches."""
    path = tmp_path / "train.svm"
    path.write_text("1 3:1\n0 4:1\n")
    job = Job("t", MODELS["logistic"])
    work(group, tmp_path, job)
    with pytest.raises(DataError, match="--batch is 7, and 1000 for the workers that train 't'"):
        work(group, tmp_path, replace(job, batch_rows=7))
    path.write_text("1 3:1\n0 4:1\n0 5:1\n")
    with pytest.raises(Invalid, match=r"data of size 18, and the workers before it .* size 12"):
        work(group, tmp_path, job)
    work(group, tmp_path, replace(job, table="u"))


def test_workers_of_a_csv_file_train_each_row_once(group, tmp_path):
    """A category and a number tell the class. Rows with other columns are not scored."""
    rows = [f"{i % 2},{'x' if i % 2 else 'y'},{i % 2 - 0.5},{i}\n" for i in range(300)]
    (tmp_path / "train.csv").write_text("target,page,number,id\n" + "".join(rows))
    (tmp_path / "other.csv").write_text("target,number,page,id\n1,1,x,1\n")
    job = Job("t", MODELS["logistic"], batch_rows=10, learning_rate=0.5)

    def train_one(index: int) -> int:
        reports = []
        source = Source(str(tmp_path / "train.csv"), target="target", categories=["id"])
        with group.connect(f"w{index}", workers=3) as server:
            assert train(server, job, source, reports.append, 0).is_whole
        return sum(each.num_rows for each in reports)

    with ThreadPoolExecutor(3) as threads:
        assert sum(threads.map(train_one, range(3))) == 300
    with group.connect("scorer") as server:
        source = Source(str(tmp_path / "train.csv"), target="target", categories=["id"])
        assert score(server, job, source).auc == 1.0
        for name, columns in (("other.csv", ["id"]), ("train.csv", [])):
            other = Source(str(tmp_path / name), target="target", categories=columns)
            with pytest.raises(DataError, match="was trained on rows with other columns"):
                score(server, job, other)
