"""Decisions of a script on the wire: settings of a round as JSON objects."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from xain_coordinator.core.errors import InvalidRequest
from xain_coordinator.core.evaluation import MAX_METRICS, why_not_metric
from xain_coordinator.core.script import RoundConfig
from xain_coordinator.core.session import Session
from xain_coordinator.core.values import Phase
from xain_coordinator.core.view import waiting_for
from xain_wire.fl import access_pb2 as pb
from xain_wire.limits import MAX_INT32

EPOCHS = "epochs"  # the setting that takes the place of rounds.epochs
# All settings of a round go into the journal, and those of a site into its assignment.
MAX_CONFIG_BYTES = 1 << 20
MAX_SITE_BYTES = 1 << 16


def round_config(request: pb.ConfigureRoundRequest) -> RoundConfig:
    """Raises InvalidRequest."""
    texts = {"": request.config, **request.by_site}
    if sum(len(text) for text in texts.values()) > MAX_CONFIG_BYTES:
        raise InvalidRequest(
            f"the settings of round {request.round} have more than {MAX_CONFIG_BYTES} bytes"
        )
    checked = {name: _checked(text, name) for name, text in texts.items()}
    whole = checked.pop("")
    return RoundConfig(whole, checked, tuple(dict.fromkeys(request.selected)))


def metrics_of(request: pb.RecordEvaluationRequest) -> dict[str, float]:
    """Raises InvalidRequest."""
    metrics = {name: request.metrics[name] for name in sorted(request.metrics)}
    if not 0 < len(metrics) <= MAX_METRICS:
        raise InvalidRequest(f"there are {len(metrics)} metrics; 1 to {MAX_METRICS} are taken")
    for name, value in metrics.items():
        if (why := why_not_metric(name, value)) is not None:
            raise InvalidRequest(why)
    return metrics


def script_status(session: Session) -> pb.FollowScriptResponse:
    script, model = session.script, session.model
    status = pb.FollowScriptResponse(
        session_id=session.session_id,
        round=session.round,
        waits=session.waits_for_script,
        is_trained=session.is_trained,
        is_finished=session.phase is Phase.FINISHED,
        cause=session.cause,
        waiting_for=waiting_for(session),
        model=-1 if model is None else model.round,
    )
    if script.round >= 0:
        config = script.config
        status.configured.CopyFrom(
            pb.ConfigureRoundRequest(
                round=script.round,
                config=config.config,
                by_site=config.by_site,
                selected=config.selected,
            )
        )
    if script.model >= 0:
        status.evaluated.CopyFrom(
            pb.RecordEvaluationRequest(model=script.model, metrics=script.metrics)
        )
    return status


def merged(first: str, *later: str) -> str:
    """One JSON object of several, in which a later one prevails; without `epochs`."""
    if not later:
        return first
    values = _values((first, *later))
    values.pop(EPOCHS, None)
    return json.dumps(values, sort_keys=True)


def epochs_of(texts: Iterable[str], default: int) -> int:
    """The epochs that a script has set; else those of the round."""
    return int(_values(texts).get(EPOCHS, default))


def _values(texts: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        values |= json.loads(text) if text else {}
    return values


def _checked(text: str, site: str) -> str:
    """The JSON object in the one form in which it is compared. Raises InvalidRequest."""
    of = f"of {site}" if site else "of the round"
    if not text:
        return ""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the settings {of} are no JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise InvalidRequest(f"the settings {of} are no JSON object")
    if len(text) > MAX_SITE_BYTES:
        raise InvalidRequest(f"the settings {of} have more than {MAX_SITE_BYTES} bytes")
    epochs = values.get(EPOCHS, 1)
    if type(epochs) is not int or not 1 <= epochs <= MAX_INT32:
        raise InvalidRequest(f"{EPOCHS} {of} is {epochs!r}; it must be a whole number from 1")
    return json.dumps(values, sort_keys=True) if values else ""
