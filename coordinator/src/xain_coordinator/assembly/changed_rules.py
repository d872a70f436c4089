"""Compare the rules that a session was opened with to those of the configuration, key by key.

A session keeps its rules to its end. A start with other settings would not do what they say, so it
is refused unless the operator says which of the two counts.
"""

from collections.abc import Iterator
from dataclasses import fields

from xain_coordinator.assembly.warm_start import is_source
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.rule_keys import as_configured, shown
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary.values import Phase, Rules
from xain_foundation.exit_statuses import CannotStart
from xain_foundation.settings.hints import hint
from xain_foundation.settings.schema import Schema

# Tables whose items mean nothing beside another value of the first field.
_OPTIONS_OF = {
    "controller_options": "controller",
    "pacing_options": "pacing",
    "staleness": "pacing",
    "aggregation_options": "aggregation",
    "optimizer_options": "optimizer",
    "workload_options": "workload",
    "preprocessing": "workload",
}

_WORKLOAD = {"workload", "workload_options", "preprocessing"}

_LENGTH = ("rounds", "passes", "consistency", "controller", "pacing", "quorum")

# Fields whose values follow from these where the configuration does not set them.
_DERIVED = ("max_participants", "start_participants", "buffer_size")
_DERIVED_FROM = ("min_participants", "fraction_participants", "expected_participants")


def differences(session: Session, config: CoordinatorConfig) -> Iterator[str]:
    """A text such as "rounds.epochs = 1 (configured: 3)" for each key whose value in the
    configuration is not the session's. Left out are keys that nobody has set and that follow from
    others."""
    schema, asked = Schema(CoordinatorConfig), config.rules()
    if session.rules.study == asked.study:
        asked = config.rules(session.rules.step)
    if session.rules.aggregation != asked.aggregation:
        asked = config.rules_of_averaging()
    changed = {
        field.name
        for field in fields(Rules)
        if getattr(session.rules, field.name) != getattr(asked, field.name)
    }
    if "study" in changed:
        changed = {"study"}  # what else differs, follows from its sessions
    if session.lineage is not None or "workload" in changed:
        changed.discard("initial")  # nothing reads it, or it follows from the workload
    for name in ("local", "importance"):
        if "workload" in changed or not config.evaluate.changed(name):
            changed.discard(f"evaluate_{name}")
    if _is_extended_as_configured(session, asked):
        changed -= {"rounds", "passes", "epochs"} if asked.plans_epochs else {"rounds", "passes"}
    if session.rules.max_participants == session.rules.start_participants:
        # The default of versions up to 0.1; one that came later changes no session.
        changed -= {"max_participants"} if config.rounds.max_participants is None else set()
    if changed.intersection(_DERIVED_FROM):
        changed -= {name for name in _DERIVED if getattr(config.rounds, name) is None}
    if config.evaluate.patience is None and changed & {*_LENGTH, *_DERIVED_FROM, *_WORKLOAD}:
        changed.discard("evaluate_patience")
    is_of_rounds = asked.passes > 0 and not session.rules.passes  # as before there were passes
    if config.has_default_length and (
        is_of_rounds or changed & {*_WORKLOAD, "aggregation_options"}
    ):
        changed -= {"rounds", "passes"}
        changed -= {"evaluate_patience"} if config.evaluate.patience is None else set()
    # The task is the workload's, where the configuration does not say it.
    follows = {"schema.task"} if changed.intersection(_WORKLOAD) else set()
    for field in fields(Rules):
        name = field.name
        if name not in changed or _OPTIONS_OF.get(name) in changed:
            continue
        kept, wanted = as_configured(session.rules, name), as_configured(asked, name)
        for key in sorted({*kept, *wanted} - follows):
            before, now = shown(schema, key, kept), shown(schema, key, wanted)
            if kept.get(key) != wanted.get(key):
                yield f"{key} = {before} (configured: {now})"


def _is_extended_as_configured(session: Session, asked: Rules) -> bool:
    """Whether the configuration has the length from before an extension, or the new total: `extend`
    changes the session and leaves the configuration to its owner."""
    lineage = session.lineage
    if lineage is None or not lineage.configured_rounds:
        return False
    if asked.passes:
        total = lineage.num_passes + session.rules.passes
        return asked.passes in (lineage.configured_passes, total)
    total = lineage.num_rounds + session.rules.rounds
    return asked.rounds in (lineage.configured_rounds, total)


def require_same_rules(session: Session, config: CoordinatorConfig, from_model: str) -> None:
    """Refuse to go on with a session under other settings than its own. from_model: the model that
    was asked for as the first one; "" if none was. Raises CannotStart."""
    different = list(differences(session, config))
    lineage = session.lineage
    own = "" if lineage is None else lineage.source
    # `extend` changes the session and leaves the command line to its owner.
    began_with = "" if lineage is None else lineage.began_with
    if from_model and not any(is_source(from_model, one) for one in (own, began_with)):
        different.append(f"--from-model = {own or '(not set)'} (configured: {from_model})")
    if not different:
        return
    resume, more = "--resume goes on with these; ", ""
    if session.rules.study:
        resume = "the sessions that follow need the settings of the study; "
    elif session.phase is Phase.FINISHED:
        resume = "--resume serves its result; "
        extend = hint("xain-coordinator", "xain-coordinator extend --rounds +1")
        more = f"to train it further, {extend}; "
    raise CannotStart(
        f"the session {session.session_id} in {config.journal.path} "
        f"{'is finished and ' if more else ''}was opened with other settings than the configured "
        f"ones: {', '.join(different)}; {resume}{more}to open a session with the "
        "configured ones, "
        + hint("xain-coordinator", "--new-session")
        + "; another --data-dir leaves this one where it is"
    )
