"""What `xain-coordinator status` shows: the answers of the Inspection service, for people or as
one JSON object."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xain_messaging.process.commands import CommandFailed
from xain_messaging.process.fields import proxy_options
from xain_messaging.process.schema import MASK
from xain_proto.fl import coordinator_pb2, inspection_pb2, inspection_pb2_grpc

DEADLINE_S = 5.0

# Rows shown; --json has all. A screen is enough for people, and a fleet may be thousands.
_MAX_PARTICIPANTS = 40
_MAX_ROUNDS = 8
_MAX_MODELS = 3
_MAX_NAMES = 6

_ALL = 2**31 - 1  # rounds and models: as many as the coordinator gives


class NoStatus(CommandFailed):
    """The coordinator did not answer with its status."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the coordinator answered. The answers are moments apart."""

    status: inspection_pb2.GetStatusResponse
    participants: inspection_pb2.ListParticipantsResponse  # all pages that were asked for
    rounds: inspection_pb2.ListRoundsResponse
    models: inspection_pb2.ListModelsResponse


def fetch(address: str, *, everything: bool = False, num_rounds: int = _MAX_ROUNDS) -> Snapshot:
    """Ask the coordinator at "host:port".

    everything: all participants, and as many rounds and models as it gives, not the first or latest
    few. num_rounds: of the latest few.

    Raises NoStatus within DEADLINE_S or little more.
    """
    limits = (_ALL, _ALL) if everything else (num_rounds, _MAX_MODELS)
    page_size = 0 if everything else _MAX_PARTICIPANTS
    gives_up_at = time.monotonic() + DEADLINE_S
    # A list of models with their layouts may exceed gRPC's usual 4 MiB.
    options = [("grpc.max_receive_message_length", -1), *proxy_options(address)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = inspection_pb2_grpc.InspectionStub(channel)
        try:
            # Together, so that one deadline holds for all.
            pending = (
                stub.GetStatus.future(inspection_pb2.GetStatusRequest(), timeout=DEADLINE_S),
                stub.ListParticipants.future(
                    inspection_pb2.ListParticipantsRequest(page_size=page_size),
                    timeout=DEADLINE_S,
                ),
                stub.ListRounds.future(
                    inspection_pb2.ListRoundsRequest(limit=limits[0]), timeout=DEADLINE_S
                ),
                stub.ListModels.future(
                    inspection_pb2.ListModelsRequest(limit=limits[1]), timeout=DEADLINE_S
                ),
            )
            status = pending[0].result()
            participants = pending[1].result()
            while everything and participants.next_page_token:
                request = inspection_pb2.ListParticipantsRequest(
                    page_token=participants.next_page_token
                )
                participants.ClearField("next_page_token")
                left_s = max(0.0, gives_up_at - time.monotonic())
                participants.MergeFrom(stub.ListParticipants(request, timeout=left_s))
            return Snapshot(status, participants, pending[2].result(), pending[3].result())
        except grpc.RpcError as error:
            raise NoStatus(_why(address, error)) from None


async def ask_service(
    service: Any, *, everything: bool = False, num_rounds: int = _MAX_ROUNDS
) -> Snapshot:
    """The same of an InspectionService in this process, without a call over the network.

    service: not imported by its type, since the server and all below it come with it.
    """
    no_call: Any = None  # the answers to such requests do not depend on it
    limits = (_ALL, _ALL) if everything else (num_rounds, _MAX_MODELS)
    page_size = 0 if everything else _MAX_PARTICIPANTS
    request = inspection_pb2.ListParticipantsRequest(page_size=page_size)
    participants = await service.ListParticipants(request, no_call)
    while everything and participants.next_page_token:
        request.page_token = participants.next_page_token
        participants.ClearField("next_page_token")
        participants.MergeFrom(await service.ListParticipants(request, no_call))
    return Snapshot(
        await service.GetStatus(inspection_pb2.GetStatusRequest(), no_call),
        participants,
        await service.ListRounds(inspection_pb2.ListRoundsRequest(limit=limits[0]), no_call),
        await service.ListModels(inspection_pb2.ListModelsRequest(limit=limits[1]), no_call),
    )


def _why(address: str, error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    if "@" in address:
        address = MASK  # no address has one, but a URL with a password in it
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return f"nobody answers at {address}; is a coordinator running there? Try --address"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer from {address} within {DEADLINE_S:g} s"
        case grpc.StatusCode.UNIMPLEMENTED:
            return f"{address} answers, but not as a coordinator that can be inspected"
        case code:
            return f"{address} answered {code.name}: {clean(error.details() or '')}"


# --- JSON -----------------------------------------------------------------------------------------


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """Everything, in plain values. Unlike protobuf's own JSON, whole numbers are numbers and
    digests are in hex."""
    return {
        "status": _plain(snapshot.status),
        "participants": _plain(snapshot.participants)["participants"],
        "rounds": _plain(snapshot.rounds)["rounds"],
        "models": _plain(snapshot.models)["models"],
    }


# These do not travel with a status, so that the fields would say nothing.
_LEFT_OUT = frozenset(
    (
        "xain_proto.fl.WeightsRef.data",
        "xain_proto.fl.WeightsRef.url",
        "xain_proto.fl.DataProfile.columns",
        "xain_proto.fl.DataProfile.statistics",
    )
)


def _plain(message: Message) -> dict[str, Any]:
    fields = message.DESCRIPTOR.fields
    return {f.name: _field(f, message) for f in fields if f.full_name not in _LEFT_OUT}


def _field(field: Any, message: Message) -> Any:  # a FieldDescriptor, of Python's or upb's
    value = getattr(message, field.name)
    if isinstance(value, Mapping):
        of_values = field.message_type.fields_by_name["value"]
        return {key: _value(of_values, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_value(field, item) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _value(field, value)


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return _plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return value


# --- for people -----------------------------------------------------------------------------------


def render(snapshot: Snapshot, console: Console) -> None:
    """The state first, then who takes part, then what has been."""
    console.print(_headline(snapshot.status))
    for warning in snapshot.status.warnings:
        console.print(Text(f"warning: {clean(warning)}", style="yellow"))
    if snapshot.participants.participants:
        console.print(_participants(snapshot))
    if snapshot.rounds.rounds:
        console.print(_rounds(snapshot.rounds.rounds, snapshot.status.metric))
    if snapshot.models.models:
        console.print(_models(snapshot.models.models))
    if snapshot.status.counters:
        console.print(_counters(snapshot.status.counters))


def _headline(status: inspection_pb2.GetStatusResponse) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()

    state = clean(status.phase) or coordinator_pb2.State.Name(status.state).lower()
    styles = dict.fromkeys(("collecting", "aggregating", "evaluating"), "bold green")
    styles["finished"] = "bold"
    line = Text(state, style=styles.get(state, "bold yellow"))
    if state == "finished":
        because = f": {clean(status.ended_because)}" if status.ended_because else ""
        line.append(f"  {clean(status.cause)}{because}", style="default")
    elif state == "evaluating":
        line.append("  the last model", style="default")
    else:
        # Rounds are counted from 0, in keys and logs too.
        nth = f"{status.round + 1} of {status.num_rounds}"
        line.append(f"  round {status.round}, {nth}", style="default")
    grid.add_row("state", line)
    if status.waiting_for:
        grid.add_row("waiting for", _text(status.waiting_for))
    for warning in status.warnings:
        grid.add_row("warning", Text(clean(warning), style="bold yellow"))
    connected = f"{status.num_connected} connected, {status.num_required} required"
    if state == "finished":
        connected = f"{status.num_connected} still connected"
    grid.add_row("participants", connected)
    if status.num_selected:
        awaited = "evaluations" if state == "evaluating" else "updates"
        grid.add_row(awaited, f"{status.num_updates} of {status.num_selected} in")
    if status.HasField("best_round"):
        best = f"{status.best_round}, {clean(status.metric)} {status.best_value:.4g}"
        grid.add_row("best model", Text(best))
    if state == "finished" and status.sites:
        counted = [
            f"{clean(one.participant_id)} {one.rounds_contributed} of {one.rounds_selected}"
            for one in status.sites
        ]
        more = f" and {len(counted) - _MAX_NAMES} more" if len(counted) > _MAX_NAMES else ""
        grid.add_row("rounds counted", Text(", ".join(counted[:_MAX_NAMES]) + more))
    if status.HasField("deadline_seconds"):
        grid.add_row("deadline", f"in {duration(max(status.deadline_seconds, 0.0))}")
    if status.HasField("ends_seconds"):
        left = duration(max(status.ends_seconds, 0.0))
        grid.add_row("ends", f"in {left}, if nothing changes")
    if status.began_with:
        before = f", {status.rounds_before} rounds before" if status.rounds_before else ""
        grid.add_row("began with", _text(f"{status.began_with}{before}"))
    about = f"{clean(status.session_id)}, {duration(status.session_seconds)}"
    if status.version:
        about += f", version {clean(status.version)}"
    grid.add_row("session", Text(about))
    return grid


def _table(title: str, *columns: tuple[str, bool]) -> Table:
    """columns: (heading, whether it is of numbers)."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for heading, numbers in columns:
        table.add_column(heading, header_style="dim", justify="right" if numbers else "left")
    return table


def _participants(snapshot: Snapshot) -> Table:
    everybody = snapshot.participants.participants
    # Most fleets have neither tags nor refusals to tell of.
    has_refusals = any(one.num_refused for one in everybody)
    has_failures = any(one.last_failure for one in everybody)
    has_tags = any(one.tags for one in everybody)
    table = _table(
        "\nParticipants",
        ("id", False),
        ("selected", False),
        ("update", False),
        ("lease left", True),
        ("samples", True),
        ("rounds", True),
        *([("refused", True)] if has_refusals else []),
        *([("last failure", False)] if has_failures else []),
        *([("tags", False)] if has_tags else []),
    )
    for one in everybody[:_MAX_PARTICIPANTS]:
        update = "in" if one.update_accepted else "awaited" if one.selected else ""
        update = transfer(one) or update
        row: list[str | Text] = [
            _text(one.participant_id),
            _selected(one),
            update,
            _lease(one),
            f"{one.profile.num_samples:,}" if one.HasField("profile") else "",
            str(one.rounds_contributed),
        ]
        if has_refusals:
            row.append(f"{one.num_refused:,}" if one.num_refused else "")
        if has_failures:
            row.append(_text(one.last_failure))
        if has_tags:
            row.append(_text(", ".join(f"{key}={one.tags[key]}" for key in sorted(one.tags))))
        table.add_row(*row)
    shown = min(len(everybody), _MAX_PARTICIPANTS)
    _more(table, max(len(everybody), snapshot.status.num_connected) - shown)
    return table


def transfer(one: inspection_pb2.ParticipantStatus) -> str:
    """Progress of a participant's transfer; empty if none is under way."""
    if not one.HasField("transfer"):
        return ""
    is_upload = one.transfer.direction == coordinator_pb2.Transfer.UPLOAD
    return f"{'uploading' if is_upload else 'downloading'} {one.transfer.percent} %"


def _lease(one: inspection_pb2.ParticipantStatus) -> str:
    # Only after the end of a session the list has participants that are gone.
    is_gone = one.reported_state == coordinator_pb2.FINISHED
    return "gone" if is_gone else duration(max(one.lease_seconds, 0.0))


def _selected(one: inspection_pb2.ParticipantStatus) -> str:
    if one.HasField("left_out_until"):
        left_out = f"out until {one.left_out_until}"
        return f"yes ({left_out})" if one.selected else left_out
    if one.not_eligible_because:
        return "not eligible"  # --json says why
    return "yes" if one.selected else ""


def _rounds(rounds: Iterable[inspection_pb2.RoundStatus], metric: str) -> Table:
    """metric: the one that models are compared by; empty if there is none yet."""
    shown_rounds = list(rounds)[-_MAX_ROUNDS:]
    by_sites = any(metric in one.evaluation.metrics for one in shown_rounds)
    by_us = any(metric in one.coordinator_evaluation.metrics for one in shown_rounds)
    table = _table(
        "\nRecent rounds",
        ("round", True),
        ("state", False),
        ("updates", True),
        ("samples", True),
        ("time", True),
        *([(clean(metric), True)] if by_sites else []),
        *([(f"{clean(metric)} here", True)] if by_us else []),
        ("from", False),
    )
    for one in shown_rounds:
        names = [clean(name) for name in one.contributors]
        shown = ", ".join(names[:_MAX_NAMES])
        if names and one.num_contributors > _MAX_NAMES:
            shown += f" and {one.num_contributors - _MAX_NAMES} more"
        lost = [f"{clean(p)} ({clean(why)})" for p, why in sorted(one.damaged_updates.items())]
        if lost:
            shown += f"; damaged: {', '.join(lost)}"
        shown += _missing(one)
        table.add_row(
            str(one.round),
            _text(one.phase),
            f"{one.num_contributors}/{one.num_selected}",
            f"{one.num_samples:,}",
            duration(one.seconds),
            *([_metric(one.evaluation, metric)] if by_sites else []),
            *([_metric(one.coordinator_evaluation, metric)] if by_us else []),
            Text(shown),
        )
    return table


def _missing(one: inspection_pb2.RoundStatus) -> str:
    """Selected participants that did not count, and why; if they are many, how many and why."""
    if not one.missing:
        counts = [f"{number} {clean(kind)}" for kind, number in sorted(one.num_missing.items())]
        return f"; missing: {', '.join(counts)}" if counts else ""
    why = [f"{clean(p)} ({clean(reason)})" for p, reason in sorted(one.missing.items())]
    more = f" and {len(why) - _MAX_NAMES} more" if len(why) > _MAX_NAMES else ""
    return f"; missing: {', '.join(why[:_MAX_NAMES])}{more}"


def _metric(evaluation: coordinator_pb2.Evaluation, metric: str) -> str:
    return f"{evaluation.metrics[metric]:.4g}" if metric in evaluation.metrics else ""


def _models(models: Iterable[inspection_pb2.ModelStatus]) -> Table:
    table = _table("\nLatest models", ("key", False), ("shape", False), ("bytes", True))
    for one in list(models)[-_MAX_MODELS:]:
        shape = " × ".join(map(str, one.shape))
        table.add_row(_text(one.ref.key), _text(f"{one.dtype} {shape}"), f"{one.ref.size_bytes:,}")
    return table


def _counters(counters: Mapping[str, int]) -> Table:
    table = _table("\nCounters", ("name", False), ("count", True))
    for name, count in sorted(counters.items()):
        table.add_row(_text(name), f"{count:,}")
    return table


def _more(table: Table, hidden: int) -> None:
    if hidden > 0:
        table.add_row(Text(f"and {hidden} more; --json shows all", style="dim"))


def _text(text: str) -> Text:
    # Text, so that a name with brackets is not taken for rich's markup.
    return Text(clean(text))


def clean(text: str) -> str:
    """Without control characters: names come from the network and could move the cursor."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
