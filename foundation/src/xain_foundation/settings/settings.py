"""Settings of a process: a TOML file, over it the environment, over that the command line.

Wrong settings stop the start, each with one line that says where it was given, which key it is,
what it is and what it may be. A misspelt key is a wrong setting too, in all three places: a default
that quietly stays in force is found out a week later.

TOML has types, so they are taken at their word: "false" is text and no boolean, true is no number.
The environment and the command line have text only, which is read as the type of the key.

pydantic checks the values. Its messages show the input, whatever it is, so messages are written
here. pydantic-settings is not used: it passes over unknown sections in the environment, and takes
text for numbers in a file if it does so in the environment.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError

from xain_foundation.settings.fields import UNCHECKED, WrongSetting
from xain_foundation.settings.schema import (
    MASK,
    Key,
    Schema,
    dotted,
    dotted_unknown,
    may_hold_password,
    why_not_value,
)

Model = TypeVar("Model", bound=BaseModel)
Origin = Literal["default", "file", "environment", "flag"]

COMMAND_LINE = "command line"
# Behind the prefix of a program, the environment variable that names the file.
FILE_VARIABLE = "CONFIG"

# Kubernetes sets these in every pod beside a Service called xain-coordinator. All of ours have two
# underscores after the section, so neither can be taken for the other.
_SERVICE_LINK = re.compile(
    r"SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)


MAX_PROBLEMS = 50  # of one message


class ConfigError(Exception):
    """The settings cannot be used. The message has a line for each mistake, and no secrets."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force, as check-config shows it.

    value: as in TOML; "" if the key is not set or a secret that is empty, MASK for other secrets.
    where: the file or the environment variable; "" for defaults and flags.
    """

    key: str
    value: str
    origin: Origin
    where: str


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it was given. source: what a message about it begins with."""

    value: object
    origin: Origin
    where: str
    source: str


@dataclass(frozen=True, slots=True)
class Resolved(Generic[Model]):
    """A checked configuration that remembers where its values came from."""

    config: Model
    given: Mapping[Key, _Given]

    def settings(self) -> list[Setting]:
        """Every value in force, in the order of the model. Secrets are masked."""
        schema = Schema(type(self.config))
        settings = []
        for leaf in schema.leaves:
            in_force = reduce(_value_of, leaf, cast(Any, self.config))
            for key, value in schema.items(leaf, in_force):
                shown = "" if value is None else "{}"
                if value not in (None, {}):
                    shown = schema.shown(key, value, whole=True)
                if schema.is_secret(key):
                    shown = MASK if value and str(value) else ""  # whether it is set may be told
                given = self.given.get(key)
                origin: Origin = given.origin if given else "default"
                where = given.where if given else ""
                settings.append(Setting(dotted(key), shown, origin, where))
        return settings


def _value_of(section: BaseModel, key: str) -> Any:
    return getattr(section, _field(section, key))


def _field(section: BaseModel, key: str) -> str:
    """The field of a section by the name of its key, which is its alias if it has one."""
    fields = type(section).model_fields
    return next(name for name in fields if (fields[name].alias or name) == key)


def load(
    model: type[Model],
    file: Path | None = None,
    env_prefix: str = "",
    overrides: Mapping[str, object] | None = None,
    sections: Sequence[str] = (),
    *,
    reads_text: bool = True,
) -> Model:
    """Read and check the settings as resolve() does, and return the configuration alone."""
    return resolve(
        model, file, env_prefix, overrides, sections=sections, reads_text=reads_text
    ).config


def resolve(
    model: type[Model],
    file: Path | None = None,
    env_prefix: str = "",
    overrides: Mapping[str, object] | None = None,
    defaults: Callable[[Mapping[str, object]], Mapping[str, object]] | None = None,
    sections: Sequence[str] = (),
    *,
    reads_text: bool = True,
) -> Resolved[Model]:
    """Read and check the settings: the file, over it the environment, over that the overrides.

    env_prefix: such as "XAIN_COORDINATOR_"; two underscores separate section and key, as in
        XAIN_COORDINATOR_ROUNDS__EPOCHS=3. "" leaves the environment out. Without a file, that of
        XAIN_COORDINATOR_CONFIG is read: in a container all commands then find the same settings.
    overrides: by dotted key; None counts as not given.
    reads_text: whether a text among them is read as the type of its key, as flags give it; else it
        is text, as in a file.
    defaults: called with the given values by dotted key; returns further values, in the form of
        overrides, for keys that none of the sources gives.
    sections: those that a command uses; what is given for others is passed over. (): all.
    Raises ConfigError with all mistakes, of MAX_PROBLEMS at most.
    """
    schema = Schema(model)
    sources = [_from_flags(schema, overrides or {}, reads_text=reads_text)]
    if env_prefix:
        sources.insert(0, _from_environment(schema, env_prefix))
        named = os.environ.get(env_prefix + FILE_VARIABLE)
        file = file or (Path(named) if named else None)
    if file is not None:
        sources.insert(0, _from_file(schema, file))
    if defaults is not None:
        told = {dotted(key): one.value for source in sources for key, one in source.given.items()}
        sources.insert(0, _from_flags(schema, defaults(told)))
    given = {key: value for source in sources for key, value in source.given.items()}
    problems = [problem for source in sources for problem in source.problems]
    if sections:
        given = {key: value for key, value in given.items() if key[0] in sections}
        problems = [problem for problem in problems if problem.key[:1] in [(s,) for s in sections]]
    try:
        config = model.model_validate(_tree(given))
    except ValidationError as error:
        known = [problem.key for problem in problems]
        for key, must in _mistakes(schema, model, given, error, known):
            problems.append(_Problem(key, _line(schema, given, key, must)))
    if problems:
        texts = list(dict.fromkeys(problem.text for problem in problems))
        if len(texts) > MAX_PROBLEMS:
            texts[MAX_PROBLEMS:] = [f"further mistakes: {len(texts) - MAX_PROBLEMS}"]
        raise ConfigError("\n".join(texts))
    return Resolved(config, given)


def mistakes(
    model: type[BaseModel], values: Mapping[str, object], error: ValidationError
) -> list[str]:
    """All mistakes in settings that a program has put together, as "KEY: what it must be".

    values: nested as the model is. error: raised by their validation.
    """
    schema = Schema(model)
    given = {}
    for leaf in schema.leaves:
        table = reduce(lambda at, section: at.get(section, {}), leaf[:-1], cast(Any, values))
        if leaf[-1] in table:
            for key, value in schema.items(leaf, table[leaf[-1]]):
                given[key] = _Given(value, "flag", "", "")
    found = _mistakes(schema, model, given, error, ())
    return [f"{dotted(key)}: {must}" for key, must in found]


# --- the sources ----------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """A mistake: the key that it is about, and the line about it."""

    key: Key
    text: str


@dataclass(slots=True)
class _Source:
    """One source of settings. given: what is known. problems: what is not."""

    given: dict[Key, _Given] = field(default_factory=dict)
    problems: list[_Problem] = field(default_factory=list)

    def refuse(self, key: Key, text: str) -> None:
        self.problems.append(_Problem(key, text))

    def take(
        self, schema: Schema, key: Key, value: object, origin: Origin, where: str, source: str
    ) -> None:
        """Add the value of a leaf, or those of a table's items."""
        for item, item_value in schema.items(key, value):
            why = why_not_value((*item, item_value))
            if why is None:
                self.given[item] = _Given(item_value, origin, where, source)
            else:
                self.refuse(item, f"{source}: {_is(schema, item, item_value)}; {why}")


def _tree(given: Mapping[Key, _Given]) -> dict[str, Any]:
    """The given values, nested as the model is."""
    tree: dict[str, Any] = {}
    for (*sections, name), one in given.items():
        at = tree
        for section in sections:
            # A flag may set a whole table to nonsense and then one item of it.
            if not isinstance(at.get(section), dict):
                at[section] = {}
            at = at[section]
        if one.value != {} or not isinstance(at.get(name), dict):  # an empty table adds nothing
            # Items of a table of tables are added to it, and not to what was given.
            at[name] = dict(one.value) if isinstance(one.value, dict) else one.value
    return tree


def _from_file(schema: Schema, file: Path) -> _Source:
    source = _Source()
    _walk(schema, file, (), _read(file), source)
    return source


def _read(file: Path) -> dict[str, object]:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: this is no TOML: {error}") from None


def _walk(
    schema: Schema, file: Path, at: Key, table: Mapping[str, object], source: _Source
) -> None:
    """Add the settings of a table of a file to the source, and refuse unknown keys."""
    for name, value in table.items():
        key = (*at, name)
        if key in schema.sections and isinstance(value, dict):
            _walk(schema, file, key, value, source)
        elif key in schema.sections:
            text = f"{file}: {_is(schema, key, value)}; it must be a section, [{dotted(key)}]"
            source.refuse(key, text)
        elif key in schema.leaves:
            source.take(schema, key, value, "file", str(file), str(file))
        elif isinstance(value, dict) and value and dotted(key) in schema.moved:
            _walk(schema, file, key, value, source)  # an old section: its keys have more to tell
        else:
            source.refuse(key, f"{file}: {_unknown(schema, key, dotted)}")


def _from_environment(schema: Schema, prefix: str) -> _Source:
    """Read the settings, and their faults, from environment variables with this prefix."""
    source = _Source()
    variables: dict[Key, str] = {}

    def name(key: Key) -> str:
        return prefix + "__".join(key).upper()

    for variable in sorted(os.environ):
        rest = variable[len(prefix) :]
        if not variable.upper().startswith(prefix.upper()) or _SERVICE_LINK.fullmatch(rest):
            continue
        if variable == prefix + FILE_VARIABLE:
            continue
        where = f"environment variable {variable}"
        # In any case of letters: some systems change it, and none should be passed over.
        key = tuple(rest.lower().split("__"))
        if key in variables:
            source.refuse(key, f"{where}: {variables[key]} is the same key; keep one of them")
        elif not schema.knows(key):
            source.refuse(key, f"{where}: {_unknown(schema, key, name)}")
        else:
            variables[key] = variable
            value = schema.parse(key, os.environ[variable])
            source.take(schema, key, value, "environment", variable, where)
    return source


def _from_flags(
    schema: Schema, overrides: Mapping[str, object], *, reads_text: bool = True
) -> _Source:
    """Read the settings, and their faults, from overrides by dotted key."""
    source = _Source()
    for text, value in overrides.items():
        if value is None:
            continue
        key = _key_of(text)
        leaf = schema.leaf_of(key)
        if leaf is not None and len(key) > (deepest := len(leaf) + schema.depth(leaf)):
            # gRPC's options have dots in their names.
            key = (*key[: deepest - 1], ".".join(key[deepest - 1 :]))
        if leaf is None:
            source.refuse(key, f"{COMMAND_LINE}: {_unknown(schema, key, dotted)}")
            continue
        parsed = schema.parse(key, value) if reads_text and isinstance(value, str) else value
        source.take(schema, key, parsed, "flag", "", COMMAND_LINE)
    return source


def _key_of(text: str) -> Key:
    """The parts of a dotted key; as in TOML they may be in quotes."""
    at: Any
    parts = []
    try:
        at = tomllib.loads(f"{text} = 0")
        while isinstance(at, dict):
            ((name, at),) = at.items()
            parts.append(name)
    except ValueError:  # names that TOML takes in quotes only
        return tuple(text.split("."))
    return tuple(parts)


# --- the messages ---------------------------------------------------------------------------------


def _is(schema: Schema, key: Key, value: object) -> str:
    """Beginning of a message about a value."""
    return f"{dotted(key)} is {schema.shown(key, value)}"


def _unknown(schema: Schema, key: Key, name: Callable[[Key], str]) -> str:
    """Why a key cannot be used, and which was meant. name: how this source writes keys."""
    text = dotted(key)
    if fate := schema.moved.get(text) or schema.moved.get(dotted(key[:1])):
        return f"{text} {fate}"
    inside = [name(leaf) for leaf in schema.leaves if leaf[: len(key)] == key]
    if key in schema.sections:
        return f"{text} is a section; set one of its keys: {', '.join(inside)}"
    meant = schema.nearest(key)
    if meant is not None:
        hint = f"did you mean {f'[{dotted(meant)}]' if meant in schema.sections else name(meant)}?"
    elif key[:-1] in schema.sections:
        siblings = [leaf[-1] for leaf in schema.leaves if leaf[:-1] == key[:-1]]
        hint = f"[{dotted(key[:-1])}] has: {', '.join(siblings)}"
    else:
        hint = f"there are: {', '.join(f'[{dotted(section)}]' for section in schema.sections)}"
    return f"unknown key {dotted_unknown(key)}; {hint}"


def _mistakes(
    schema: Schema,
    model: type[BaseModel],
    given: Mapping[Key, _Given],
    error: ValidationError,
    unsure: Sequence[Key],
) -> Iterator[tuple[Key, str]]:
    """Yield wrong values, then conflicts: keys and what they must be. unsure: other wrong keys."""
    wrong: dict[Key, str] = {}
    for key, must in _wrong_values(schema, error):
        wrong.setdefault(key, must)  # every member of a union complains
    for key, must in (
        *wrong.items(),
        *_conflicts(schema, model, given, [*unsure, *wrong]),
    ):
        _, value = _origin(given, key)
        # The cause may repeat what is not shown.
        is_shown = schema.is_url(key) or not may_hold_password(value)
        yield key, must if is_shown else "a URL is not taken here"


def _wrong_values(schema: Schema, error: ValidationError) -> Iterator[tuple[Key, str]]:
    """Yield keys whose values are wrong by themselves, and what each must be."""
    for details in error.errors(include_url=False):
        if isinstance(details.get("ctx", {}).get("error"), WrongSetting):
            continue
        at = tuple(map(str, details["loc"]))
        # pydantic goes on after the key, with the member of a union that did not fit.
        leaf = next((at[:n] for n in range(1, len(at) + 1) if at[:n] in schema.leaves), None)
        key = at if leaf is None else at[: len(leaf) + schema.is_table(leaf)]
        yield key, _must(schema, key, details["type"])


def _conflicts(
    schema: Schema,
    model: type[BaseModel],
    given: Mapping[Key, _Given],
    mistaken: Sequence[Key],
) -> Iterator[tuple[Key, str]]:
    """Conflicts between keys, of the checks that read nothing of what the mistakes are about.

    What an unknown key probably meant is unknown too: its default is not what the user wants.
    Checks of the whole read nothing of the conflicts within a section.
    """
    unsure = {leaf for key in mistaken for leaf in _meant(schema, key)}
    sure = {key: one for key, one in given.items() if schema.leaf_of(key) not in unsure}
    # A copy, because a section without a key that is given is the default of its model.
    config = model.model_validate(_tree(sure), context=UNCHECKED).model_copy(deep=True)
    for at in sorted([*schema.sections, ()], key=len, reverse=True):  # inner sections first
        for leaf in unsure:
            section = reduce(_value_of, leaf[:-1], cast(Any, config))
            vars(section).pop(_field(section, leaf[-1]), None)
        for conflict in reduce(_value_of, at, cast(Any, config)).conflicts():
            key = (*at, *_split(schema, at, conflict.key))
            unsure |= _meant(schema, key)
            yield key, conflict.text


def _meant(schema: Schema, key: Key) -> set[Key]:
    """Leaves that a key with a mistake is, has or was meant to be."""
    meant = key if key in schema.sections else schema.leaf_of(key) or schema.nearest(key)
    return {leaf for leaf in schema.leaves if meant and leaf[: len(meant)] == meant}


def _line(schema: Schema, given: Mapping[Key, _Given], key: Key, must: str) -> str:
    """Return the line of a message: where a key was given, its value, and what it must be."""
    source, value = _origin(given, key)
    if value is _NO_VALUE:
        return f"{source}: {dotted(key)}: {must}"
    return f"{source}: {_is(schema, key, value)}; {must}"


_NO_VALUE = object()


def _origin(given: Mapping[Key, _Given], key: Key) -> tuple[str, object]:
    """The source and the value of a key, for a message about it."""
    if key in given:
        return given[key].source, given[key].value
    # A whole table, or a key that is not there: the last and strongest source of any part of it.
    for n in range(len(key), 0, -1):
        beside = [g for other, g in given.items() if other[:n] == key[:n]]
        if beside:
            return beside[-1].source, _NO_VALUE
    return "settings", _NO_VALUE


def _split(schema: Schema, at: Key, relative: str) -> Key:
    """Split a dotted key of a WrongSetting; the name of a table's item may have dots."""
    parts = tuple(relative.split("."))
    leaf = schema.leaf_of((*at, *parts))
    depth = len(leaf) - len(at) if leaf is not None else len(parts)
    return (*parts[:depth], ".".join(parts[depth:])) if len(parts) > depth else parts


def _must(schema: Schema, key: Key, kind: str) -> str:
    """Say what the value of a key must be. kind: of pydantic's error."""
    if schema.leaf_of(key) is None:
        return "it must be a section"
    if kind == "missing":
        return f"it must be given, as {schema.allowed(key)}"
    if kind == "finite_number":
        return "it must be finite"
    return f"it must be {schema.allowed(key)}"
