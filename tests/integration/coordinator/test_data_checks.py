"""The data of all sites are checked and described before the first model, over real channels."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from support.logs import capture_logs
from xain_coordinator.inspection.client import fetch
from xain_participant import Agent
from xain_participant.tables.workload_participant import WorkloadParticipant
from xain_participant.wire.client import CoordinatorClient, open_channel
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.inspection_pb2 import DescribeRequest, GetStatusResponse
from xain_wire.fl.inspection_pb2_grpc import InspectionStub
from xain_workloads.tables.checks.describe import TableOne
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table

PATIENCE_S = 240.0
ROOT = Path(__file__).parents[3]
WORKLOAD = {"name": "sgd"}


def patients(num_rows: int, seed: int, *, age_in: float = 1.0) -> Table:
    chance = np.random.RandomState(seed)
    age = np.clip(chance.normal(61, 12, num_rows), 18, 99).round()
    sex = np.empty(num_rows, dtype=object)
    sex[:] = np.where(chance.rand(num_rows) < 0.5, "female", "male").tolist()
    outcome = np.where(chance.rand(num_rows) < 1 / (1 + np.exp(-(age - 61) / 8)), "dead", "alive")
    columns = (Column("age", "number", "years"), Column("sex", "category"))
    return Table(columns, {"age": age * age_in, "sex": sex}, outcome, "outcome", ("alive", "dead"))


def days_for_years() -> dict[str, Table]:
    return {"north": patients(120, 0), "south": patients(130, 1, age_in=365.25)}


class Recorder(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Keeps each request that leaves a participant, and the names of what is told beside it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.metadata: set[str] = set()

    def _keep(self, details: Any, request: Message) -> Message:
        self.sent.append((details.method.rpartition("/")[2], request))
        self.metadata.update(key for key, _ in details.metadata or ())
        return request

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Message) -> Any:
        return continuation(details, self._keep(details, request))

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details, (self._keep(details, one) for one in requests))

    intercept_unary_stream = intercept_unary_unary
    intercept_stream_stream = intercept_stream_unary

    def channel(self, target: str, silence_s: tuple[float, float]) -> grpc.Channel:
        return grpc.intercept_channel(open_channel(target, silence_s), self)


class Sites:
    """Agents in threads, and what each was told of its data."""

    def __init__(
        self,
        port: int,
        participants: Mapping[str, WorkloadParticipant],
        recorder: Recorder | None = None,
    ) -> None:
        self.told: dict[str, list[str]] = {name: [] for name in participants}
        self.have_heard = Event()  # all of them
        self.agents = [
            Agent(
                participant,
                f"127.0.0.1:{port}",
                name,
                tags={"kind": "hospital"},
                observer=self._observer(name),
                channel=open_channel if recorder is None else recorder.channel,
            )
            for name, participant in participants.items()
        ]
        self._threads = ThreadPoolExecutor(len(self.agents))
        self._ends = [self._threads.submit(agent.run) for agent in self.agents]

    def _observer(self, name: str) -> Callable[[str, int, str], None]:
        def observe(step: str, _: int, why: str) -> None:
            if step == "data_finding":
                self.told[name].append(why)
                if all(self.told.values()):
                    self.have_heard.set()

        return observe

    async def ended(self) -> list[int]:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.gather(*map(asyncio.wrap_future, self._ends))
        finally:
            self.stop()

    def stop(self) -> None:
        for agent in self.agents:
            agent.stop()
        self._threads.shutdown(wait=False)


def participants_of(tables: Mapping[str, Table]) -> dict[str, WorkloadParticipant]:
    """A fifth of the rows is held out."""
    found = {}
    for name, table in tables.items():
        cut = table.num_samples // 5
        test = table.subset(range(cut))
        found[name] = WorkloadParticipant(table.subset(range(cut, table.num_samples)), test=test)
    return found


async def status_with(
    port: int, is_there: Callable[[GetStatusResponse], bool]
) -> GetStatusResponse:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = (await asyncio.to_thread(fetch, f"127.0.0.1:{port}")).status
            if is_there(status):
                return status
            await asyncio.sleep(0.1)  # a poll, not a race


async def test_finding_is_logged_journalled_shown_and_told_to_its_site(start):
    """Days for years at one site of three: that site hears of it, the others do not, and a
    coordinator that is started again still knows."""
    tables = {**days_for_years(), "east": patients(140, 2)}
    rounds = {"rounds": 2, "min_participants": 3}
    with capture_logs() as lines:
        coordinator = await start(workload=WORKLOAD, rounds=rounds)
        sites = Sites(coordinator.port, participants_of(tables))
        await sites.ended()
    (line,) = [one for one in lines if one["event"] == "data_finding" and "check" in one]
    assert (line["participant"], line["check"], line["column"]) == ("south", "units", "age")
    told = sites.told
    assert {name: len(texts) for name, texts in told.items()} == {"north": 0, "south": 1, "east": 0}
    assert told["south"][0].startswith("warn: south: column 'age': values are about 365")
    await coordinator.stop()
    again = await start(workload=WORKLOAD, rounds=rounds)
    snapshot = await asyncio.to_thread(fetch, f"127.0.0.1:{again.port}")
    (finding,) = snapshot.status.findings
    assert (finding.level, finding.participant_id, finding.column) == ("warn", "south", "age")
    assert "data.factors" in finding.fix


async def test_site_is_told_a_finding_once(start):
    """Once in a stream, and not in heartbeats of a site that says what it knows. One that has died
    and comes again hears it again; so does one that has no stream, or knows another finding."""
    tables = days_for_years()
    rounds = {"rounds": 3, "min_participants": 2, "start_participants": 2}
    # The answer to an update brings the next round; the stream tells more when a site was missed.
    server = {"heartbeat_timeout_s": 5.0}
    coordinator = await start(workload=WORKLOAD, rounds=rounds, server=server)
    address = f"127.0.0.1:{coordinator.port}"

    def heard() -> tuple[list[int], list[int]]:
        """Findings in heartbeats, and in the messages of a stream until the next round."""
        with ExitStack() as stack:
            clients = [stack.enter_context(CoordinatorClient(address, name)) for name in tables]
            for client, table in zip(clients, tables.values(), strict=True):
                client.rendezvous(table.profile())
            _, south = clients
            while south.heartbeat(pb.READY, 0).state != pb.ROUND:
                time.sleep(0.02)  # a poll, not a race: it ends when the round is open
            first = south.heartbeat(pb.READY, 0)
            others = (first.findings_digest, b"another")
            calls = [south.heartbeat(pb.READY, 0, known_findings=known) for known in others]
            stream = south.watch()
            messages = [next(stream)]
            for client in clients:
                work = client.start_round()
                update = client.put_weights(work.round, client.get_weights(work.model))
                client.end_round(client.end_request(work.round, update, 9, ""))
            while messages[-1].round == messages[0].round:
                messages.append(next(stream))
            again = next(south.watch())  # of a process that has come in the place of the other
            return [len(one.findings) for one in (first, *calls)], [
                *(len(one.findings) for one in messages),
                len(again.findings),
            ]

    async with asyncio.timeout(PATIENCE_S):
        heartbeats, (first, *later, again) = await asyncio.to_thread(heard)
    assert heartbeats == [1, 0, 1]
    assert (first, sum(later), again) == (1, 0, 1)


async def test_finding_of_level_refuse_makes_no_model(start):
    """The session waits for other data; status says why, and the site hears it."""
    coordinator = await start(
        workload=WORKLOAD,
        rounds={"rounds": 1, "min_participants": 2},
        checks={"units": "refuse"},
        server={"heartbeat_time_s": 0.2},
    )
    tables = days_for_years()
    sites = Sites(coordinator.port, participants_of(tables))
    try:
        status = await status_with(coordinator.port, lambda one: bool(one.findings))
        await asyncio.to_thread(sites.have_heard.wait, PATIENCE_S)
    finally:
        sites.stop()
    assert "no model can be made for these" in status.waiting_for
    assert "south: column 'age'" in status.waiting_for
    assert sites.told["south"][0].startswith("refuse: south: column 'age'")
    snapshot = await asyncio.to_thread(fetch, f"127.0.0.1:{coordinator.port}")
    assert snapshot.models.total_size == 0


async def test_thirty_sites_of_four_rows_train_scaled_or_not_at_all(start):
    """Nothing of four rows travels by default, and the fleet is refused by name. With min_known at
    each site the model is scaled by all rows."""
    few = {f"clinic-{i:02}": patients(4, 100 + i) for i in range(30)}
    rounds = {"rounds": 1, "min_participants": 30}
    coordinator = await start(workload=WORKLOAD, rounds=rounds)
    sites = Sites(coordinator.port, {name: WorkloadParticipant(one) for name, one in few.items()})
    try:
        status = await status_with(coordinator.port, lambda one: bool(one.findings))
    finally:
        sites.stop()
    assert "no site tells anything of its columns" in status.waiting_for
    assert "clinic-00 4" in status.waiting_for
    assert "data.min_known = 1" in status.waiting_for
    await coordinator.stop()
    coordinator = await start(workload=WORKLOAD, rounds=rounds, new_session=True)
    tell = {name: WorkloadParticipant(one, min_known=1) for name, one in few.items()}
    await Sites(coordinator.port, tell).ended()
    models = (await asyncio.to_thread(fetch, f"127.0.0.1:{coordinator.port}")).models.models
    prepared = json.loads(models[0].metadata["preprocessing"])["columns"]
    pooled = np.concatenate([table.values["age"] for table in few.values()])
    assert prepared[0]["center"] == pytest.approx(pooled.mean())
    assert prepared[1]["categories"] == ["female", "male"]


async def test_session_that_describes_trains_nothing(start):
    """The session ends with the description, and its sites with status 0, even where the checks
    would refuse to train. Over the network there are no figures of a single site."""
    tables = days_for_years()
    coordinator = await start(
        workload={"name": "describe"}, rounds={"min_participants": 2}, checks={"units": "refuse"}
    )
    assert await Sites(coordinator.port, participants_of(tables)).ended() == [0, 0]
    snapshot = await asyncio.to_thread(fetch, f"127.0.0.1:{coordinator.port}")
    assert snapshot.status.cause == "completed"
    assert {one.column for one in snapshot.status.findings} == {"age"}
    assert snapshot.rounds.total_size == 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.port}") as channel:
        answer = await InspectionStub(channel).Describe(DescribeRequest())
    table = TableOne.from_json(answer.table)
    assert (table.num_sites, table.num_samples, table.min_sites) == (2, {}, 2)
    (age, _) = table.rows
    assert (table.target.sites, age.sites) == ({}, {})
    pooled = np.concatenate([t.values["age"][t.num_samples // 5 :] for t in tables.values()])
    assert age.together.mean == pytest.approx(pooled.mean())


# Fields of messages that the coordinator sends, too, and participants leave empty.
NOT_OF_SITES = frozenset(
    (
        "EndTrainingRound evaluation.averages",
        "EndTrainingRound evaluation.figures",
        "EndTrainingRound evaluation.local.differences.num_samples",
        "EndTrainingRound evaluation.local.figures",
        "EndTrainingRound evaluation.local.num_samples",
        "EndTrainingRound update.url",
    )
)


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def fields(message: Descriptor, prefix: str) -> Iterator[str]:
    """Names of all fields, those of messages inside with a dot."""
    for field in message.fields:
        if field.message_type is None or is_map(field):
            yield f"{prefix}{field.name}"
        else:
            yield from fields(field.message_type, f"{prefix}{field.name}.")


def paths(message: Message, prefix: str = "") -> Iterator[str]:
    """Names of the fields that are set, those of messages inside with a dot, and so the keys of
    maps; names of tags are a site's own."""
    for field, value in message.ListFields():
        name = f"{prefix}{field.name}"
        if is_map(field) and field.name != "tags":
            yield from (f"{name}.{key}" for key in value)
        elif name == "EndTrainingRound metrics":
            for point in json.loads(value):
                yield from (f"{name}.{key}" for key in point["fields"])
        elif field.message_type is None or is_map(field):
            yield name
        else:
            for one in (value,) if isinstance(value, Message) else value:
                yield from paths(one, f"{name}.")


def keys(value: Any, prefix: str) -> Iterator[str]:
    """Keys of the JSON of statistics; names of columns and categories are none."""
    if isinstance(value, list):
        for one in value:
            yield from keys(one, prefix)
    elif isinstance(value, dict) and not prefix.endswith(("counts", "class_counts")):
        for key, one in value.items():
            yield from keys(one, f"{prefix}.{key}")
    else:
        yield prefix


def documented() -> set[str]:
    """Fields of the table, and with a dot the keys that it lists for a field."""
    text = (ROOT / "docs" / "data.md").read_text()
    part = text.split("## What travels")[1].split("\n## ")[0]
    listed = set()
    for names, about in re.findall(r"^\| (`[^|]+`) \| (.+) \|$", part, flags=re.MULTILINE):
        for name in re.findall("`([^`]+)`", names):
            listed.update((name, *(f"{name}.{key}" for key in re.findall(r"`(\w+)`", about))))
    return listed


def test_each_field_that_a_participant_can_send_is_listed_in_the_docs():
    service = pb.DESCRIPTOR.services_by_name["Coordinator"]
    can_send = set[str]()
    for method in service.methods:
        can_send.update(fields(method.input_type, f"{method.name} "))
    assert sorted(can_send - NOT_OF_SITES - documented()) == []


@pytest.mark.parametrize(
    ("workload", "task"),
    [("sgd", "classification"), ("sgd", "regression"), ("xgboost", "classification")],
)
async def test_all_that_leaves_a_site_is_listed_in_the_docs(start, workload, task):
    """Each field of each request of a training, each key of the statistics and of maps, and what
    is told beside each call."""
    tables = days_for_years()
    if task == "regression":
        for name, table in tables.items():
            chance = np.random.RandomState(len(name))
            price = table.values["age"] + chance.normal(0, 3, table.num_samples)
            tables[name] = Table(table.columns, table.values, price, "price")
    visits = np.arange(130, dtype=np.uint64) // 2
    tables["south"] = replace(tables["south"], without_target=9, groups=visits, group="patient")
    coordinator = await start(
        workload={"name": workload, "options": {} if workload == "xgboost" else {"task": task}},
        rounds={"rounds": 2, "min_participants": 2},
    )
    recorder = Recorder()
    await Sites(coordinator.port, participants_of(tables), recorder).ended()
    left = {f"metadata {key}" for key in recorder.metadata}
    for method, request in recorder.sent:
        left.update(paths(request, f"{method} "))
        if method == "Rendezvous":
            statistics = json.loads(request.profile.statistics)
            left.update(keys(statistics, "statistics"))
    assert {"Rendezvous profile.statistics", "EndTrainingRound metrics.seconds"} <= left
    not_listed = sorted(left - documented())
    assert not not_listed, "\n".join(not_listed)
