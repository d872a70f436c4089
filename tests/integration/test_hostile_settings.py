"""Hostile configurations: each is refused with one line and exit status 2, without its secrets."""

import asyncio
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.commands import called
from xain_coordinator.cli.launch.sparse import SparseConfig
from xain_coordinator.config.coordinator import ENV_PREFIX as COORDINATOR_PREFIX
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.settings.fields import Section
from xain_foundation.settings.schema import Key, Schema, dotted
from xain_foundation.settings.settings import ConfigError, resolve
from xain_parameters.config import SchedulerConfig, ServerConfig
from xain_participant.config import ENV_PREFIX as PARTICIPANT_PREFIX
from xain_participant.config import ParticipantConfig
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection

SECRET = "hunter2hunter2"
SEED = 8
VALUES_PER_KEY = 4  # of each source; hundreds of keys have them all several times
MAX_LINE = 1000  # characters
MAX_SECONDS = 20.0  # a value that hangs takes minutes

# As flags and the environment have them.
TEXTS = (
    *("", " ", "0", "-1", "1/3", "true", "null", "{}", "[]", ".", "~"),
    *(str(2**31), str(2**62), str(2**64), "9" * 4000, "9" * 5000, "0x" + "f" * 5000),
    *("1e400000", "1e-300", "1e-99", "1e99", "1e-400000000", "1e400000000", "1/0", "nan", "-inf"),
    *("[" * 200, "[" * 20_000, "{" * 20_000, '{"a":' * 3000),
    *("~nosuchuser/x", "/dev/null/x", "a\nb", "\udcff", "x" * 100_000, "1979-05-27"),
    *(":" * 60_000, ":" * 100_000, "a:" * 30_000 + "b"),
    *('{"a": 1e400}', '{"a": "\\ud800"}', '{"a\\u0000b": 1}', '["a", "OR"]', '{"": ""}'),
    *('{"a": ' + "9" * 5000 + "}", '{"a": [1, {"b": 2}]}'),
    *(f"http://user:{SECRET}@h", f"http://h:{SECRET}", f"user:{SECRET}@h"),
    *(f"http://h/?X-Amz-Signature={SECRET}", "http://[::1", "http://h:99999"),
)
# As a file has them.
TOML = (
    *("0", "-1", "true", "1.5", "1e400", "nan", "-inf", "1e-400000000", '"1e-400000000"'),
    *(str(2**31), str(2**63), "9" * 5000, "0x" + "f" * 5000, '""', '"\\u0000"', '"a\\nb"'),
    *("[" * 5000 + "]" * 5000, "{a=" * 300 + "1" + "}" * 300),
    *("[]", "[[]]", "{}", '{""=""}', '["x"]', '[["a", "OR"], "AND"]', "1979-05-27T00:00:00Z"),
    *('"~nosuchuser/x"', f'"http://user:{SECRET}@h"', f'"http://h/?token={SECRET}"'),
)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def refusal(model: type[Section], **sources: object) -> str | None:
    """The message about a configuration; None if it is taken."""
    try:
        resolved = resolve(model, **sources)
    except ConfigError as error:
        return str(error)
    for setting in resolved.settings():
        setting.value.encode()  # check-config prints it
    return None


def keys(model: type[Section]) -> list[Key]:
    """All keys, and an item of each table."""
    schema = Schema(model)
    items = [(*leaf, "a") for leaf in schema.leaves if schema.is_table(leaf)]
    return [*schema.leaves, *items]


@pytest.mark.parametrize(
    ("model", "prefix"),
    [(CoordinatorConfig, COORDINATOR_PREFIX), (ParticipantConfig, PARTICIPANT_PREFIX)],
)
def test_every_key_refuses_hostile_values_in_one_line(model, prefix, tmp_path):
    """Each key gets values drawn from those above, from a file, the environment and a flag: they
    are taken, or refused in one line without a secret, and nothing hangs."""
    chance = random.Random(SEED)
    file = tmp_path / "settings.toml"
    for key in keys(model):
        name = dotted(key)
        tried = []
        begin = time.monotonic()
        for value in chance.sample(TEXTS, VALUES_PER_KEY):
            tried.append((f"flag {value!r}", refusal(model, overrides={name: value})))
            with variable(prefix + "__".join(key).upper(), value):
                tried.append((f"variable {value!r}", refusal(model, env_prefix=prefix)))
        for value in chance.sample(TOML, VALUES_PER_KEY):
            file.write_text(f"[{dotted(key[:-1])}]\n{dotted(key[-1:])} = {value}\n")
            tried.append((f"file {value}", refusal(model, file=file)))
        assert time.monotonic() - begin < MAX_SECONDS, name
        for how, told in tried:
            where = f"{name}, {how[:100]}"
            assert told is None or ("\n" not in told and len(told) <= MAX_LINE), where
            assert told is None or SECRET not in told, where


# One of each type that TOML has.
TYPES = (
    *("true", "3", "-3", "1.5", '"text"', '""', "[]", "[1]", '["a"]', "[[1]]", "[{}]", "{}"),
    *("{a = 1}", "{a = {b = 1}}", "1979-05-27T00:00:00Z", "1979-05-27", "07:32:00"),
)
# Words of pydantic for a value that does not fit.
WORDS = re.compile(
    r"constrained|input|validat|instance|strict|unexpected|finite_number|pydantic|literal_error"
    r"|_type|_parsing|-(int|str|float|bool|dict|tuple|list)\b|function|\bNone\b|\bdict\b|\btuple\b"
)


@pytest.mark.parametrize(
    "model", [CoordinatorConfig, ParticipantConfig, SchedulerConfig, ServerConfig, SparseConfig]
)
def test_value_of_another_type_is_refused_by_the_name_of_its_key(model, tmp_path):
    """Each key of each program gets values of half of the types in a file: they are taken, or every
    line of the refusal names a key in our words."""
    chance = random.Random(SEED)
    file = tmp_path / "settings.toml"
    names = [dotted(key) for key in keys(model)]
    wrong = []
    for key in keys(model):
        for value in chance.sample(TYPES, len(TYPES) // 2):
            section = f"[{dotted(key[:-1])}]\n" if len(key) > 1 else ""
            file.write_text(f"{section}{dotted(key[-1:])} = {value}\n")
            for line in (refusal(model, file=file) or "").splitlines():
                said = line.removeprefix(f"{file}: ")
                subject = said.removeprefix("unknown key ")
                if (
                    said == line
                    or not any(re.match(rf"{re.escape(name)}[.:; ]", subject) for name in names)
                    or key[-1] not in said
                    or WORDS.search(said.replace(dotted(key), "KEY"))
                ):
                    wrong.append(f"{dotted(key)} = {value}: {said}")
    assert wrong == []


HOSTILE_FILE = "[server]\ngrpc_options.x = " + "[" * 5000 + "]" * 5000 + "\n"


async def test_hostile_settings_end_a_process_with_status_2(tmp_path):
    """Real processes: a line for each mistake, exit status 2, no traceback, no secret."""
    (tmp_path / "deep.toml").write_text(HOSTILE_FILE)
    coordinator = ("-m", "xain_coordinator", f"--data-dir={tmp_path}", "--port=0")
    participant = ("-m", "xain_participant", "--data=iris")
    many = "9" * 4500
    commands = [
        ({}, (*coordinator, "--min-participants=1000000000")),
        ({}, (*coordinator, f"--set=server.grpc_options.grpc.x={2**40}")),
        ({}, (*coordinator, "--set=journal.path=~nosuchuser/x")),
        ({}, (*coordinator, f"--set=rounds.seed={many}", f"--set=workload.options.eta0={many}")),
        ({}, (*coordinator, "--set=rounds.fraction_participants=1e-400000000")),
        ({}, (*coordinator, f"--config={tmp_path / 'deep.toml'}")),
        ({"XAIN_COORDINATOR_ROUNDS__QUORUM": "[" * 20_000}, coordinator),
        ({}, (*coordinator, "--set", "storage.secret_access_key=", SECRET)),
        ({}, (*participant, "--set=data.num_features=2147483648", f"--no-such-flag={SECRET}")),
        ({}, (*participant, "--index")),
    ]

    async def end(environment: dict[str, str], command: tuple[str, ...]) -> None:
        status, out, told = await called(*command, **environment)
        assert (status, out) == (2, ""), (command, told)
        lines = told.splitlines()
        assert 1 <= len(lines) <= 2, (command, told)  # one for each mistake
        assert all(line.startswith("xain-") and len(line) <= MAX_LINE for line in lines)
        assert SECRET not in told

    async with asyncio.timeout(120):
        await asyncio.gather(*(end(*command) for command in commands))
    assert not (tmp_path / "journal.sqlite").exists()


@pytest.mark.parametrize(
    "rounds",
    [
        {"rounds": 3, "epochs": (2**31 - 1) // 3},
        {"rounds": 2**30 - 1, "epochs": 1, "refused_rounds": 2**30 - 1},
        {"start_participants": 1, "max_participants": 1_000_000},
    ],
)
async def test_largest_counts_fit_the_wire(enter, start, rounds):
    """Sessions with the largest settings that are taken answer every call in every round."""
    coordinator = await start(rounds=rounds)
    [a] = await enter(coordinator, "a")
    for round_ in range(3):
        await a.until(pb.ROUND, round_)
        work = await a.start()
        # The first round makes the model, and trains no epochs.
        assert work.epoch_base == max(round_ - 1, 0) * work.epochs
        await a.status()
        await a.inspection.ListParticipants(inspection.ListParticipantsRequest())
        await a.hand_in([1.0], round_=round_)
