"""The programs of docs/from-maro.md run, and MARO's call of a proxy names ours."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.terminals import files_of
from xain_messaging import MembershipServer, Proxy

PAGE = (Path(__file__).parents[3] / "docs" / "from-maro.md").read_text(encoding="utf-8")
REDIS = "redis://localhost:6379/0"
LONG_S = 300.0
PROGRAMS = {
    ("worker.py", "worker.py", "master.py"): ["", "", "4950\n"],
    ("actor.py", "actor.py", "learner.py"): ["", "", "2\n"],
    ("member.py", "member.py"): ["[0.0, 1.0, 2.0, 3.0] [3.0, 5.0, 7.0]\n"] * 2,
}


@pytest.mark.parametrize("names", PROGRAMS, ids=lambda names: names[-1])
def test_programs_of_the_page_run(tmp_path, names):
    """With a MembershipServer in the place of the page's Redis."""
    with MembershipServer(settle_s=0.0) as server, ExitStack() as stack:
        processes = []
        for name in names:
            text = files_of(PAGE)[name]
            assert REDIS in text
            (tmp_path / name).write_text(text.replace(REDIS, server.target))
            process = subprocess.Popen(
                [sys.executable, tmp_path / name], stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=LONG_S)[0] for process in processes]
    assert outputs == PROGRAMS[tuple(names)]
    assert [process.returncode for process in processes] == [0] * len(processes)


def test_every_program_of_the_page_is_run():
    assert set(files_of(PAGE)) == {name for names in PROGRAMS for name in names}


def test_call_of_maros_proxy_names_todays_call():
    """The call in the error works, with the same peers."""
    with pytest.raises(TypeError) as caught:
        Proxy(group_name="sum", component_type="worker", expected_peers=[("master", 1)])
    assert str(caught.value) == (
        "component_type: MARO's; the same here is Proxy('sum', 'worker', {'master': 1}, "
        f'discovery="{REDIS}", driver="zmq"); see docs/from-maro.md'
    )
    with pytest.raises(TypeError, match=r"name='w0', discovery=\"redis://10.0.0.1:7000/0\""):
        Proxy("sum", "worker", {"master": 1}, component_name="w0", redis_address=("10.0.0.1", 7000))
