"""Workers that train sparse models together, on servers with real sockets."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from support.parameter_group import Group
from xain_parameters import Invalid, LocalGroup
from xain_participant.sparse_worker import Job, Progress, Score, declare_source, score, train
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


def work(group: LocalGroup, folder: Path, job: Job) -> list[Progress]:
    reports: list[Progress] = []
    source = Source(str(folder / "train.svm"))
    with group.connect(f"w{job.index}") as server:
        train(server, job, source, reports.append, 0)
    return reports


def together(group: LocalGroup, folder: Path, job: Job) -> list[list[Progress]]:
    jobs = [replace(job, index=index) for index in range(job.num_workers)]
    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(lambda each: work(group, folder, each), jobs))


def scored(group: LocalGroup, folder: Path, job: Job) -> Score:
    with group.connect("scorer") as server:
        return score(server, job, Source(str(folder / "test.svm")))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("staleness", [0, 2, None])
def test_three_workers_reach_the_loss_of_one(group, folder, name, staleness):
    """On rows that none of them has seen, clearly better than chance."""
    job = Job(name, MODELS[name], staleness=staleness, batch_rows=100, num_epochs=4)
    (single,) = together(group, folder, replace(job, table="alone"))
    reports = together(group, folder, replace(job, num_workers=3))
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
    reports: list[Progress] = []
    with group.connect("w0", job=name) as server:
        train(server, job, Source(str(folder / "train.svm")), reports.append, 0)
        return reports, score(server, job, Source(str(folder / "test.svm")))


def test_bounded_table_gives_the_same_model(group, folder):
    """In a job of its own, and after other clocks of one: it begins with its first batch there."""
    job = Job("open", MODELS["logistic"], batch_rows=100)
    bounded = replace(job, table="bounded", bound=SHAPES["kdd12"].scaled(SCALE).num_columns)
    first, second = alone(group, folder, job), alone(group, folder, bounded)
    assert [each.clock for each in second[0]] == [each.clock for each in first[0]]
    assert first[1] == second[1]
    third, fourth = (
        alone(group, folder, each, "both") for each in (job, replace(bounded, table="later"))
    )
    assert fourth[0][0].clock > third[0][-1].clock
    assert third[1] == fourth[1] == first[1]


def test_worker_without_rows_holds_no_other_back(group, tmp_path):
    """The others wait for three workers, of which one has a part without a line."""
    (tmp_path / "train.svm").write_text("1 1:1" + 60 * " " + "\n0 2:1\n")
    job = Job("t", MODELS["logistic"], num_workers=3, batch_rows=1, num_epochs=2)
    reports = together(group, tmp_path, job)
    assert sorted(len(each) for each in reports) == [0, 2, 2]


def test_worker_process_without_rows_warns_and_has_a_status_of_its_own(group, tmp_path):
    """Two workers divide one row."""
    (tmp_path / "train.svm").write_text("1 1:1\n")
    words = [
        "sparse",
        f"--server={group.target}",
        f"--data={tmp_path / 'train.svm'}",
        "--workers=2",
    ]

    def run(index: int) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "xain_participant", *words, f"--index={index}"],
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(2) as threads:
        idle, busy = sorted(threads.map(run, range(2)), key=lambda each: -each.returncode)
    assert (busy.returncode, idle.returncode) == (0, 5), idle.stderr
    assert '"nothing_to_train_on"' in idle.stderr
    assert "of 2 has no rows" in idle.stderr


def test_killed_worker_goes_on_with_its_batch(group, folder):
    """The model is the same as without the kill."""

    class Killed(Exception):
        pass

    before: list[Progress] = []

    def kill(progress: Progress) -> None:
        before.append(progress)
        if len(before) == 40:  # of 60 in two epochs; its push has been made, its clock not ticked
            raise Killed

    job = Job("whole", MODELS["logistic"], batch_rows=100, num_epochs=2)
    whole, expected = alone(group, folder, job)
    assert len(whole) == 60
    job = replace(job, table="killed")
    source = Source(str(folder / "train.svm"))
    with pytest.raises(Killed), group.connect("w0") as server:
        train(server, job, source, kill, 0)
    after, found = alone(group, folder, job)
    assert after[0].clock == before[-1].clock
    assert [each.loss for each in (*before[:-1], *after)] == [each.loss for each in whole]
    assert found == expected


@pytest.mark.parametrize("staleness", [0, None])
def test_stopped_worker_trains_its_rest_after_the_others_have_ended(group, tmp_path, staleness):
    """The stopped worker's part has more batches than the others'. No worker waits for another."""
    lines = [f"{i % 2} {i % 7}:1\n" for i in range(30)] + [
        f"1 {30 * '0'}{i}:1\n" for i in range(20)
    ]
    (tmp_path / "train.svm").write_text("".join(reversed(lines)))
    job = Job("t", MODELS["logistic"], num_workers=3, batch_rows=1, staleness=staleness)
    source = Source(str(tmp_path / "train.svm"))

    class Stopped(Exception):
        pass

    def stop(progress: Progress) -> None:
        raise Stopped

    def stopped() -> None:
        with pytest.raises(Stopped), group.connect("w2") as server:
            train(server, replace(job, index=2), source, stop, 0)

    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(work, group, tmp_path, replace(job, index=i)) for i in range(2)]
        threads.submit(stopped).result()
        num_clocks = max(len(other.result()) for other in others)
    after = work(group, tmp_path, replace(job, index=2))
    assert after[-1].clock >= num_clocks


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


def test_longer_training_waits_for_all_workers_again(group, tmp_path):
    """Workers of the first training were done with one epoch."""
    (tmp_path / "train.svm").write_text("".join(f"{i % 2} {i % 7}:1\n" for i in range(30)))
    job = Job("t", MODELS["logistic"], num_workers=2, batch_rows=1)
    assert [len(each) for each in together(group, tmp_path, job)] == [15, 15]
    reports = together(group, tmp_path, replace(job, num_epochs=2))
    assert [len(each) for each in reports] == [15, 15]
    assert [len(each) for each in together(group, tmp_path, replace(job, num_epochs=2))] == [0, 0]


def test_batches_come_again_after_a_rollback(folder):
    """All tables are empty again, also that of the first clocks."""
    job = Job("t", MODELS["logistic"], batch_rows=100)
    group = Group(2)
    source = Source(str(folder / "train.svm"))
    reports: list[Progress] = []

    def roll_back(progress: Progress) -> None:
        reports.append(progress)
        if len(reports) == 7:
            group.roll_back(0)

    with group.worker("w0") as server:
        train(server, job, source, roll_back, 0)
    assert [each.clock for each in reports] == [*range(7), *range(30)]
    assert [each.loss for each in reports[:6]] == [each.loss for each in reports[7:13]]
    group.close()


def test_workers_with_different_sources_are_refused(group, tmp_path):
    """Their parts would not have each row once: a file with a row more, or other --workers."""
    path = tmp_path / "train.svm"
    path.write_text("1 3:1\n0 4:1\n")
    job = Job("t", MODELS["logistic"], num_workers=2)
    first, second = replace(job, index=0), replace(job, index=1)
    with group.connect("w0") as one, group.connect("w1") as other:
        declare_source(one, first, Source(str(path)))
        with pytest.raises(DataError, match="worker 0 divides 12 bytes among 2 workers, and worke"):
            declare_source(other, replace(second, num_workers=3), Source(str(path)))
        path.write_text("1 3:1\n0 4:1\n0 5:1\n")
        with pytest.raises(DataError, match=r"worker 1 18 bytes among 2, .* same --data, --target"):
            train(other, second, Source(str(path)))
    path.write_text("1 3:1\n0 4:1\n")
    assert [len(each) for each in together(group, tmp_path, replace(job, table="u"))] == [1, 1]


def test_workers_of_a_csv_file_train_each_row_once(group, tmp_path):
    """A category and a number tell the class. Rows with other columns are not scored."""
    rows = [f"{i % 2},{'x' if i % 2 else 'y'},{i % 2 - 0.5},{i}\n" for i in range(300)]
    (tmp_path / "train.csv").write_text("target,page,number,id\n" + "".join(rows))
    (tmp_path / "other.csv").write_text("target,number,page,id\n1,1,x,1\n")
    job = Job("t", MODELS["logistic"], num_workers=3, batch_rows=10, learning_rate=0.5)

    def run(index: int) -> int:
        reports: list[Progress] = []
        source = Source(str(tmp_path / "train.csv"), target="target", categories=["id"])
        with group.connect(f"w{index}") as server:
            train(server, replace(job, index=index), source, reports.append, 0)
        return sum(each.num_rows for each in reports)

    with ThreadPoolExecutor(3) as threads:
        assert sum(threads.map(run, range(3))) == 300
    with group.connect("scorer") as server:
        source = Source(str(tmp_path / "train.csv"), target="target", categories=["id"])
        assert score(server, job, source).auc == 1.0
        for name, columns in (("other.csv", ["id"]), ("train.csv", [])):
            other = Source(str(tmp_path / name), target="target", categories=columns)
            with pytest.raises(DataError, match="was trained on rows with other columns"):
                score(server, job, other)
