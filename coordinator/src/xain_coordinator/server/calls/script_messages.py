"""Decisions of a script on the wire: settings of a round as JSON objects."""

import json
from typing import Any, NoReturn

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.evaluation import checked
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary.errors import invalid_request
from xain_coordinator.core.vocabulary.script import RoundConfig
from xain_coordinator.core.vocabulary.values import Phase
from xain_foundation.settings.fields import parse_json
from xain_wire.fl import access_pb2 as pb

EPOCHS = "epochs"  # which a participant finds among the settings, and which are none of them
# Limits of the canonical form. The settings of a round go into the journal, and those of a site
# into its assignment.
MAX_CONFIG_BYTES = 1 << 20
MAX_SITE_BYTES = 1 << 16


def configuration(request: pb.ConfigureRoundRequest) -> c.ConfigureRound:
    """The command with a script's decisions about a round, its settings as canonical JSON. Raises
    INVALID_REQUEST."""
    if "" in (*request.selected, *request.by_site, *request.site_epochs):
        raise invalid_request("a participant without a name is configured; each has one")
    whole = _canonical(request.config, "of the round")
    by_site = {site: _canonical(text, f"of {site}") for site, text in request.by_site.items()}
    by_site = {site: by_site[site] for site in sorted(by_site) if by_site[site]}
    if sum(map(len, (whole, *by_site.values()))) > MAX_CONFIG_BYTES:
        raise invalid_request(
            f"the settings of round {request.round} have more than {MAX_CONFIG_BYTES} bytes as JSON"
        )
    config = RoundConfig(
        whole,
        by_site,
        tuple(dict.fromkeys(request.selected)),
        request.epochs,
        {site: request.site_epochs[site] for site in sorted(request.site_epochs)},
    )
    return c.ConfigureRound(request.round, config, request.session_id)


def evaluation(request: pb.RecordEvaluationRequest) -> c.RecordEvaluation:
    """The command with a script's evaluation of a model. Raises INVALID_REQUEST."""
    if not request.metrics:
        raise invalid_request(f"the evaluation of model {request.model} has no metric")
    try:
        measured = checked(request.num_samples, request.metrics)
    except ValueError as error:
        raise invalid_request(str(error)) from None
    return c.RecordEvaluation(
        request.model, measured.num_samples, measured.metrics, request.session_id
    )


def script_status(session: Session) -> pb.FollowScriptResponse:
    """Status of a session for its script, without the position."""
    script, model, rules = session.script, session.model, session.rules
    is_planned = session.plan is not None or not rules.passes
    status = pb.FollowScriptResponse(
        session_id=session.session_id,
        is_scripted=session.rules.scripted,
        round=session.round,
        waits=session.waits_for_script,
        is_trained=session.is_trained,
        is_finished=session.phase is Phase.FINISHED,
        cause=session.cause,
        model=-1 if model is None else model.round,
        is_over=script.is_over,
        rounds=rules.num_rounds if is_planned else 0,
    )
    if script.round >= 0:
        config = script.config
        status.configured.CopyFrom(
            pb.ConfigureRoundRequest(
                round=script.round,
                config=config.config,
                by_site=config.by_site,
                selected=config.selected,
                epochs=config.epochs,
                site_epochs=config.site_epochs,
                session_id=session.session_id,
            )
        )
    if script.model >= 0:
        status.evaluated.CopyFrom(
            pb.RecordEvaluationRequest(
                model=script.model,
                num_samples=script.num_samples,
                metrics=script.metrics,
                session_id=session.session_id,
            )
        )
    return status


def merged(first: str, *later: str) -> str:
    """One JSON object of several, in which a later one prevails; "": an empty one."""
    if not later:
        return first
    values: dict[str, Any] = {}
    for text in (first, *later):
        values |= json.loads(text) if text else {}
    return json.dumps(values, sort_keys=True)


def _canonical(text: str, of: str) -> str:
    """The JSON object in the one form in which it is compared; "": an empty one. of: whose settings
    they are, in words. Raises INVALID_REQUEST."""

    def refuse(value: str) -> NoReturn:
        raise ValueError(f"{value} is not finite")

    if not text:
        return ""
    try:
        values = parse_json(text, parse_constant=refuse)
        # A number such as 1e999 is read as infinity.
        canonical = json.dumps(values, sort_keys=True, allow_nan=False)
    except ValueError as error:
        raise invalid_request(f"the settings {of} are no JSON: {error}") from None
    if not isinstance(values, dict):
        raise invalid_request(f"the settings {of} are no JSON object")
    if EPOCHS in values:
        raise invalid_request(
            f"{EPOCHS} are among the settings {of}; they have fields of their own, epochs and "
            "site_epochs"
        )
    if len(canonical) > MAX_SITE_BYTES:  # of ASCII
        raise invalid_request(f"the settings {of} have more than {MAX_SITE_BYTES} bytes as JSON")
    return canonical if values else ""
