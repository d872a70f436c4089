"""Each hint of an error message is typed into the program that it is about."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import typer
from pydantic import BaseModel

from support.command_lines import APPS, parsed
from support.trees import nodes_of
from xain_coordinator.cli.launch.sparse import SparseConfig
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.commands import parse_assignments
from xain_foundation.settings.hints import PLACEHOLDERS, hint, setting_of
from xain_foundation.settings.schema import Schema
from xain_foundation.settings.settings import ConfigError, _from_file, _from_flags, load
from xain_parameters.config import SchedulerConfig, ServerConfig
from xain_participant.config import ParticipantConfig

ROOT = Path(__file__).parents[2]
MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "xain-coordinator": (CoordinatorConfig, SparseConfig),
    "xain-parameter-server": (SchedulerConfig, ServerConfig),
    "xain-participant": (ParticipantConfig,),
}
VALUES = (
    *("1", "1.5", "true", "a=b"),
    *("a", "sgd", "regression", "bagging", "127.0.0.1", "weighted_average", "category", ","),
    '["a"]',
    "{}",
)
# A string that tells what to type, and is not made by hint().
HINT = re.compile(r"\b(set|add|try|give|use) (--[a-z]|\[[a-z]+\] |[a-z_]+\.[a-z_.]+ = )", re.I)


class Found(NamedTuple):
    where: str
    program: str
    typed: str


def calls() -> Iterator[Found]:
    """Each call of hint(); for what is not literal in it stands VALUE."""
    for file in sorted(ROOT.glob("*/src/**/*.py")):
        for node in nodes_of(file):
            match node:
                case ast.Call(func=ast.Name(id="hint"), args=[program, *typed]):
                    where = f"{file.relative_to(ROOT)}:{node.lineno}"
                    assert isinstance(program, ast.Constant), where
                    assert len(typed) == 1, where
                    yield Found(where, program.value, text_of(typed[0], where))


def text_of(node: ast.expr, where: str) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            texts = [each.value if isinstance(each, ast.Constant) else "VALUE" for each in parts]
            return "".join(map(str, texts))
    raise AssertionError(f"{where}: what is typed must be literal but for values")


FOUND = list(calls())


def filled(typed: str) -> Iterator[str]:
    """Fill a hint with a value for each of its placeholders."""
    quoted = re.compile(rf'"({"|".join(PLACEHOLDERS)})"')
    bare = re.compile(rf"\b({'|'.join(PLACEHOLDERS)})\b")
    for value in VALUES:
        yield bare.sub(value, quoted.sub(json.dumps(value.strip('"')), typed))


def is_taken(program: str, setting: str, file: Path) -> bool:
    """Whether a program knows the key and takes the value; other keys may be missing beside it."""
    key = tuple(each.strip('"') for each in setting.partition(" = ")[0].split("."))
    file.write_text(setting)
    try:
        tomllib.loads(setting)
    except tomllib.TOMLDecodeError:
        return False
    for model in MODELS[program]:
        schema = Schema(model)
        if not schema.knows(key):
            continue
        try:
            load(model, file)
        except ConfigError as error:
            # Another key may be needed beside it; the value itself must be one that is allowed.
            return f"it must be {schema.allowed(key)}" not in str(error)
        return True
    return False


def options(command: Any) -> Iterator[Any]:
    """The options of a command and of its sub-commands."""
    yield from command.params
    for other in getattr(command, "commands", {}).values():
        yield from options(other)


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{found.where}")
def test_hint_can_be_typed(found, tmp_path):
    where, program, typed = found
    assert program in MODELS, where
    if typed.startswith("--"):
        apps = [app for name, app in APPS.items() if name.split()[0] == program]
        known = [each for app in apps for each in options(cast(Any, typer.main.get_command(app)))]
        words = shlex.split(typed)
        for at, word in enumerate(words):
            if word.startswith("--"):
                matching = [each for each in known if word in getattr(each, "opts", ())]
                assert matching, f"{where}: {program} has no {word}"
                has_value = at + 1 < len(words) and not words[at + 1].startswith("--")
                assert any(getattr(each, "is_flag", False) != has_value for each in matching), where
    elif typed.startswith("xain-"):
        name, *arguments = shlex.split(typed)
        parsed(name, arguments)
    else:
        file = tmp_path / "settings.toml"
        taken = [each for each in filled(typed) if is_taken(program, each, file)]
        assert taken, f"{where}: {typed}"
        for each in taken:
            require_flag_is_read_the_same(program, each, file)


def require_flag_is_read_the_same(program: str, setting: str, file: Path) -> None:
    """The flag that a hint of a setting shows is read as the setting is in a file."""
    # Between double quotes neither sh, PowerShell nor cmd changes other characters than these.
    shown = re.search(r'\(--set "([^"$`\\%!]*)"\)$', hint(cast(Any, program), setting))
    if shown is None:
        return
    file.write_text(setting)
    for schema in map(Schema, MODELS[program]):
        flags = _from_flags(schema, parse_assignments(program, [shown[1]], "a=b"))
        values = [
            {key: given.value for key, given in source.given.items()}
            for source in (flags, _from_file(schema, file))
        ]
        assert values[0] == values[1], shown[0]


def test_hints_are_made_by_one_function():
    """No other string of the product tells what to type."""
    others = []
    for file in sorted(ROOT.glob("*/src/**/*.py")):
        if file.name == "hints.py":
            continue
        nodes = nodes_of(file)
        made = {id(each) for node in nodes if _is_hint(node) for each in ast.walk(node)}
        made |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            is_help = "\n\n" in node.value
            if id(node) not in made and HINT.search(node.value) and not is_help:
                others.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}")
    assert others == []


def _is_hint(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hint"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("rounds.epochs = 3", "set rounds.epochs = 3"),
        ('storage.kind = "s3"', 'set storage.kind = "s3"'),
        ('data.decimal = ","', 'set data.decimal = "," (--set "data.decimal=\',\'")'),
        (
            'data.units."body mass" = "kg"',
            'set data.units."body mass" = "kg" (--set "data.units.\'body mass\'=\'kg\'")',
        ),
        ('data.drop = ["it\'s"]', 'set data.drop = ["it\'s"]'),
        ("--port 0", "add --port 0"),
        ("xain-participant sparse-data clicks", "run `xain-participant sparse-data clicks`"),
    ],
)
def test_words_of_a_hint(typed, words):
    assert hint("xain-participant", typed) == words
    assert setting_of(words) == (typed if words.startswith("set") else "")
