"""The commands of docs/parameter-server.md train a model on two servers."""

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.terminals import files_of
from xain_foundation.net.sockets import free_ports
from xain_parameters import Assign, LocalGroup
from xain_parameters.client.batches import NOTE_DIM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parameter-server.md").read_text(encoding="utf-8")
LONG_S = 100.0
ADDRESS_FLAGS = {
    "scheduler": "--listen",
    "serve": "--scheduler",
    "status": "--scheduler",
    "sparse": "--server",
}


def words_of(line: str, address: str) -> list[str]:
    """The words of a command, at an address of this test."""
    program, *rest = shlex.split(line.removesuffix(" &"))
    if program == "python":
        return [sys.executable, *rest]
    flag = ADDRESS_FLAGS.get(rest[0])
    at = [] if flag is None else [flag, address]
    if rest[0] == "launch":  # launches of other tests may run at the same time
        at = ["--name", f"page-{address.rpartition(':')[2]}"]
    return [str(Path(sys.executable).with_name(program)), *rest, *at]


@contextmanager
def typed(folder: Path) -> Iterator[dict[str, str]]:
    """Type all commands of the page. Yields the output of each that has ended."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    for name, text in files_of(PAGE).items():
        (folder / name).write_text(text)
    running = []
    outputs = {}
    try:
        for line in re.findall(r"^    ((?:xain-[a-z-]+|python) .*)$", PAGE, re.MULTILINE):
            process = subprocess.Popen(
                words_of(line, address), cwd=folder, stdout=subprocess.PIPE, text=True
            )
            running.append(process)
            if not line.endswith("&"):
                outputs[line] = process.communicate(timeout=LONG_S)[0]
                assert process.returncode == 0, line
        yield outputs
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_commands_of_the_page_train_a_model(tmp_path):
    with typed(tmp_path) as outputs:
        (score,) = [text for line, text in outputs.items() if "--epochs 0" in line]
        (visits,) = [text for line, text in outputs.items() if "--table visits" in line]
        assert float(visits.split()[-1]) > 0.8
        (status,) = [text for line, text in outputs.items() if "status" in line]
        assert float(score.split()[-1]) > 0.8  # AUC
        assert status.startswith("parameters: 2 servers")
        (launch,) = [text for line, text in outputs.items() if " launch " in line]
        measured = re.search(r"accuracy (0[.]\d+), AUC (0[.]\d+)\n", launch)
        assert measured, launch
        assert float(measured[2]) > 0.8
        assert outputs["python predict.py"].strip() == f"accuracy {measured[1]}"
        said = outputs["python ask.py"]
        assert said.count("w0 says hello") == 3
        assert f"```\n{said}```" in PAGE
        assert outputs["python try.py"].strip() == "[0.9375 0.9375 0.9375]"


def test_job_on_the_page_is_that_of_the_example():
    """The example is run by test_examples.py."""
    (job,) = re.findall(r"^```python\n(def .*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert job in (ROOT / "examples" / "parameter_jobs.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_stopped_worker_process_goes_on_with_its_batch(tmp_path, number, status):
    """The same command goes on behind the batches that it had completed."""
    text = "".join(f"{i % 2} {i % 50}:1 {50 + i % 7}:1\n" for i in range(6_000))
    (tmp_path / "x.svm").write_text(text)
    with LocalGroup(2) as group, group.connect("observer", job="clicks") as observer:
        line = "xain-participant sparse --data x.svm --batch 10 --job clicks"
        words = words_of(line, group.target)
        worker = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE)
        table = observer.table("logistic.parts", NOTE_DIM, update=Assign(), dtype="float64")
        while table.pull([0])[0, 0] == 0:  # a poll, not a race: it ends with the first clock
            assert worker.poll() is None
        worker.send_signal(number)
        worker.communicate(timeout=LONG_S)
        assert worker.returncode == status
        again = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=False
        )
        assert again.returncode == 0, again.stderr
        last = re.findall(r'"clock": (\d+)', again.stderr)[-1]
        assert int(last) == 599  # 6,000 rows in batches of 10, each trained in one clock
