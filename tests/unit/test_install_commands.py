"""Commands that install: no index has our own distributions, so they come from wheels."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"\bpip3? install\s([^`#\n]*)")
WHEEL = re.compile(r"(?:.*/)?xain_(\w+)-([\d.]+|\*)(?:-py3-none-any)?\.whl(?:\[(\w+)\])?")
OF_A_CALL = "wheels.py"  # makes the commands that programs show


def texts() -> list[Path]:
    """Pages, sources with their messages and --help, templates and files of deployments."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    kinds = {".md", ".py", ".toml", ".yaml", ".yml", ".ipynb", ".html", ".js", ""}
    return [
        ROOT / name
        for name in listed.stdout.split("\0")
        if Path(name).suffix in kinds
        and not name.startswith("tests/")
        and (ROOT / name).is_file()
        and Path(name).name != OF_A_CALL
    ]


def project(distribution: str) -> dict[str, Any]:
    text = (ROOT / distribution / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def wrong_names(command: str) -> list[str]:
    """Requirements of a command that are ours and no wheel, or a wheel that is not made."""
    wrong = []
    for word in re.split(r"[\s'\"]+", command):
        if "{" in word or not re.match(r"(\S*/)?xain[-_]", word):
            if "{" in word:  # made by a program, which has pip_install() for it
                wrong.append(word)
            continue
        wheel = WHEEL.fullmatch(word.rstrip(".,;:)"))
        if wheel is None:
            wrong.append(word)
            continue
        made = project(wheel[1])
        if wheel[2] not in ("*", made["version"]):
            wrong.append(word)
        if wheel[3] and wheel[3] not in made["optional-dependencies"]:
            wrong.append(word)
    return wrong


def test_no_page_and_no_message_installs_ours_by_name():
    """Another package may have the name on an index, or will."""
    num_commands = 0
    for path in texts():
        for command in COMMAND.findall(path.read_text(encoding="utf-8", errors="replace")):
            num_commands += 1
            assert not wrong_names(command), f"{path.relative_to(ROOT)}: pip install {command}"
    assert num_commands > 20


def test_extras_that_programs_tell_to_install_exist():
    num_calls = 0
    for distribution in ("coordinator", "participant", "parameters", "workloads"):
        for path in (ROOT / distribution / "src").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                values = [one.value if isinstance(one, ast.Constant) else "" for one in node.args]
                match called, values:
                    case "pip_install", [name, *extra]:
                        names = [str(name or f"xain-{distribution}").removeprefix("xain-")]
                    case "pip_install_extra", extra:
                        names = ["coordinator", "participant"]
                    case _:
                        continue
                num_calls += 1
                for known in map(project, names):
                    assert not extra or extra[0] in known["optional-dependencies"], path
    assert num_calls > 9
