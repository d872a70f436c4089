"""The commands of docs/http.md, typed in their order."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from support.served import Served
from support.terminals import BIN

pytestmark = pytest.mark.frameworks
PAGE = Path(__file__).parents[2] / "docs" / "http.md"


def commands() -> list[str]:
    """Indented lines that call our programs or curl, whole if they go on below; without those for a
    closed coordinator."""
    lines = re.findall(r"(?m)^    ((?:curl|xain-)[^\n]*(?:\n      [^\n]*)*)$", PAGE.read_text())
    whole = [" ".join(line.split("\n")) for line in lines]
    return [line for line in whole if "--cacert" not in line and " tokens create " not in line]


def test_commands_of_the_page_fit_and_predict(tmp_path):
    """Both fits are awaited where the page says so; no answer is an error."""
    outputs = []
    with Served(tmp_path) as served:
        for line in commands():
            line = line.replace("localhost:8080", f"localhost:{served.http_port}")
            line = line.replace("http.port=8080", f"http.port={served.http_port}")
            words = shlex.split(line.removesuffix(" &"))
            if words[0] == "curl":
                outputs.append(curl(served, words))
            elif words[0] == "xain-coordinator":
                run(served, "coordinator", [*words, f"--port={served.port}"])
                served.until(served.answers)
            else:
                name = words[words.index("--id") + 1]
                run(served, name, [*words, f"--coordinator=localhost:{served.port}"])
    assert json.loads(outputs[0])["state"] == "finished"
    assert json.loads(outputs[1])["predictions"] == ["setosa", "virginica"]
    assert json.loads(outputs[2])["rounds"] == 20
    assert json.loads(outputs[3])["state"] in ("fitting", "finished")
    assert json.loads(outputs[4])["rounds"] == 3
    assert "event: SessionOpened" in outputs[5]
    assert json.loads(outputs[6]) == {"fit": "ok"}
    assert json.loads(outputs[7]) == {"y_pred_rows": ["setosa"]}
    assert len(outputs) == 8


def run(served: Served, name: str, words: list[str]) -> None:
    served.run(name, [str(BIN / words[0]), *words[1:]])


def curl(served: Served, words: list[str]) -> str:
    """The answer. A stream ends after its time. A fit is asked for when both participants are
    there, who start late on a busy machine, and no other fit goes on."""
    if "/v1/fit" in " ".join(words[:5]):
        served.until(lambda: served.status()["connected"] == 2)
        served.until(lambda: served.status()["state"] != "fitting")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    is_stream = "--max-time" in words
    assert done.returncode == (28 if is_stream else 0), done.stderr
    assert '"error"' not in done.stdout, done.stdout
    return done.stdout
