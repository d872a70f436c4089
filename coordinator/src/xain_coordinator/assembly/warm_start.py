"""Sessions that begin with a model that is there already: of a file, or of another session.

The model is copied into the new session's store before the session is written to the journal, so
that the session depends on nothing else from its first instant on.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xain_coordinator.aggregation.publishing import copy_object
from xain_coordinator.aggregation.rules import mode_option
from xain_coordinator.config.choices import REMEDY
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.parts.control import why_not_control
from xain_coordinator.core.vocabulary.events import DurableEvent, ModelInitialised, ModelRequested
from xain_coordinator.core.vocabulary.keys import model_key, state_key
from xain_coordinator.core.vocabulary.values import BYTES, DataProfile, GlobalModel, Lineage, Rules
from xain_coordinator.driver.effects import store_model
from xain_coordinator.journal.restore import restore_session
from xain_coordinator.ports import Journal, Snapshot, WeightsStore
from xain_coordinator.stores.integrity import read_vector
from xain_coordinator.stores.journalled import store_of_session
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.upkeep.model_folder import MODELS_INDEX
from xain_foundation.exit_statuses import CannotStart
from xain_foundation.names import shortened
from xain_foundation.settings.hints import hint
from xain_workloads.errors import NoModel
from xain_workloads.exported.model_files import (
    UNREADABLE,
    metadata_of,
    read_json,
)
from xain_workloads.measures.thresholds import KEY as THRESHOLD_KEY
from xain_workloads.model import (
    OF_TRAINING,
    PERSONAL,
    Layout,
    Model,
    TensorSpec,
    control_size,
    personal_patterns,
    require_personal,
    size_of,
)
from xain_workloads.passes import stride
from xain_workloads.remedies import SCAFFOLD
from xain_workloads.scaffold import with_control, without_control
from xain_workloads.tables.schema import Column
from xain_workloads.workload import create

LAST, BEST = "last", "best"
MAX_SHOWN = 10  # models that a refusal names
SIDECAR = ".json"  # beside a .npy, or MODELS_INDEX in its folder

_OF_SESSION = re.compile(r"([0-9a-f]{12})/(\d{1,10}|last|best)")
_SAME_RULE = 'aggregation.rule = "weighted_average" with rounds.consistency = "bsp" goes on with it'


@dataclass(frozen=True, slots=True)
class FirstModel:
    """The model that a new session begins with.

    layout: of the model. profiles: those that it was made from, which later ones must fit; empty if
        they are not known.
    copy: put it into the store of the new session; blocks, and raises StoreError.
    """

    lineage: Lineage
    metadata: Mapping[str, str]
    layout: Layout
    profiles: tuple[DataProfile, ...]
    copy: Callable[[WeightsStore], GlobalModel]

    def rules(self, rules: Rules) -> Rules:
        """Rules of the new session, in which no participant makes initial weights. The stride of
        its rounds follows from the options of the model, which the configuration may leave out."""
        if rules.initial == "first":
            rules = replace(rules, initial="empty")
        if not rules.workload:
            return rules
        options = json.loads(self.metadata.get("options", "{}"))
        made = getattr(create(rules.workload, options), "options", None)
        return replace(rules, stride=stride(made, str(mode_option(rules).get("mode", ""))))

    def events(self, store: WeightsStore, at: float) -> list[DurableEvent]:
        """Copy the model into the session's store. Returns the events with which the session has
        it, without what the metadata say of the end of its training."""
        model = self.copy(store)
        kept = {name: text for name, text in model.metadata.items() if name not in OF_TRAINING}
        model = replace(model, metadata=kept)
        return [ModelRequested(self.profiles), ModelInitialised(model, at)]


def is_source(text: str, source: str) -> bool:
    """Whether a session whose Lineage has this source began with the model that the text names."""
    session_id, _, round_ = text.rpartition("/")
    if round_ in (LAST, BEST) and _OF_SESSION.fullmatch(text):
        return source.startswith(f"{session_id}/")
    return source in (text, str(Path(text).absolute()))


def first_model(
    text: str, config: CoordinatorConfig, journal: Journal, store: WeightsStore
) -> FirstModel:
    """The model that --from-model names, a file or a model of a session, with the options and the
    control variate that the configuration asks for.

    store: of all sessions. Raises CannotStart, JournalError and StoreError.
    """
    found = _OF_SESSION.fullmatch(text)
    if found is not None and not Path(text).exists():
        first = model_of_session(journal, store, found[1], found[2])
    else:
        first = _model_of_file(Path(text).absolute())
    _require_fit(first, config)
    name = config.workload.name
    given = {**config.workload.whole_options, **mode_option(config.rules())}
    own = json.loads(first.metadata.get("options", "{}"))
    options = _without_remedy(own, config) | given
    has_control = control_size(first.layout) > 0
    # The file of a script's model has no control variate, and says that it needs one.
    is_asked = bool(name) or "workload" not in first.metadata
    uses_control = (is_asked and options.get("remedy") == SCAFFOLD) or (has_control and not name)
    why = why_not_control(config.rules())
    if name and config.model.personal and not why:
        why = "model.personal keeps tensors at the sites"
    if uses_control and why and not config.study.model:
        raise CannotStart(
            f"{first.lineage.source} is trained with control variates, and {why}; "
            + (hint("xain-coordinator", 'workload.remedy = ""') if name else _SAME_RULE)
        )
    # The model keeps its metadata; the options of the training are those that are asked for now.
    metadata = dict(first.metadata)
    if name and options != own:
        metadata["options"] = json.dumps(options, sort_keys=True)
    if patterns := _personal(first, options, config):
        metadata[PERSONAL] = json.dumps(patterns)
    elif name and "remedy" in config.workload.model_fields_set:
        metadata.pop(PERSONAL, None)
    if metadata == first.metadata and uses_control == has_control:
        return first

    def copy(target: WeightsStore) -> GlobalModel:
        """Copy the model, with a control variate added or removed, as model 0."""
        if uses_control == has_control:
            return replace(first.copy(target), metadata=metadata)
        memory = MemoryStore()
        found = first.copy(memory)
        model = Model(read_vector(memory, found.ref), found.layout, metadata)
        model = with_control(model) if uses_control else without_control(model)
        return store_model(target, 0, model)

    return replace(first, metadata=metadata, copy=copy)


def model_of_session(
    journal: Journal, store: WeightsStore, session_id: str, round_: str, *, extends: bool = False
) -> FirstModel:
    """A global model of a session in the journal.

    round_: its number, LAST or BEST. extends: the new session goes on with the training, its epochs
        and the optimiser's state. Raises CannotStart and JournalError.
    """
    records = journal.records_of(session_id)
    if records is None:
        raise CannotStart(
            f"{session_id}/{round_}: this journal has no session {session_id}, and without it the "
            "layout of its models is not known"
        )
    last = restore_session(records)
    session = last.session
    model = session.model
    if round_ == BEST:
        best = session.evaluation.winner
        if best is None:
            raise CannotStart(f"{session_id}/{round_}: no model of it was evaluated")
        round_ = str(best.round)
    if round_ != LAST:
        model = last.history.models.get(model_key(int(round_)))
    if model is None or model.is_empty:
        models = [m.round for m in last.history.models.values() if not m.is_empty]
        is_removed = round_ != LAST and int(round_) in last.history.removed
        why = "was removed by [storage] keep_models" if is_removed else "is no model of it"
        raise CannotStart(f"{session_id}/{round_} {why}; {_there_are(models)}")
    lineage = Lineage(f"{session_id}/{model.round}")
    if extends:
        lineage = _extended(last, lineage)
    source, chosen = store_of_session(store, journal, session_id), model

    def copy(target: WeightsStore) -> GlobalModel:
        """Copy the model as model 0; for an extension, the state of the optimiser, too."""
        ref = copy_object(source, chosen.ref, target, model_key(0))
        state = {}
        if extends:
            for name, old in chosen.state.items():
                state[name] = copy_object(source, old, target, state_key(0, name))
        return replace(chosen, round=0, ref=ref, state=state)

    return FirstModel(lineage, model.metadata, model.layout, session.requested or (), copy)


def _there_are(models: Sequence[int]) -> str:
    """A clause that lists the models of a session: the last ones, where they are many."""
    if not models:
        return "it has no model"
    shown = ", ".join(map(str, models[-MAX_SHOWN:]))
    return f"its models are {'..., ' * (len(models) > MAX_SHOWN)}{shown}"


def _extended(last: Snapshot, lineage: Lineage) -> Lineage:
    """A lineage with the rounds, epochs and passes that were trained up to an extension, and with
    the length and the beginning from before the first one."""
    session = last.session
    assert session.model is not None, "a session without a model is not extended"
    before = session.lineage or Lineage("")
    return replace(
        lineage,
        num_rounds=before.num_rounds + session.num_trained,
        num_epochs=session.epoch_base,
        num_passes=before.num_passes + session.num_passes,
        configured_rounds=before.configured_rounds or session.rules.rounds,
        configured_passes=before.configured_passes
        if before.configured_rounds
        else session.rules.passes,
        began_with=before.began_with if before.configured_rounds else before.source,
    )


def _model_of_file(path: Path) -> FirstModel:
    """The model of a file as the first one of a session. Raises CannotStart."""
    model, profile = load_model_file(path)

    def copy(target: WeightsStore) -> GlobalModel:
        return store_model(target, 0, model)

    profiles = () if profile is None else (profile,)
    return FirstModel(Lineage(str(path)), model.metadata, model.layout, profiles, copy)


def load_model_file(path: Path) -> tuple[Model, DataProfile | None]:
    """A model, and the data profile that it was made for if the file tells.

    .npy: a flat vector. What belongs to it is in a JSON object in the file of the same name with
    ".json" behind it, or in MODELS_INDEX of its folder: layout, metadata, profile.
    .npz, .safetensors, .json: as `export` writes them. A .npz or .safetensors file without the JSON
    object has a tensor for each array, in their order.
    Raises CannotStart. Nothing is unpickled.
    """
    from xain_workloads.exported.formats import read_weights

    try:
        if path.suffix == ".npy":
            about = _sidecar(path)
            layout = tuple(
                TensorSpec(
                    str(t["name"]), tuple(t["shape"]), str(t["dtype"]), t.get("kind", "weight")
                )
                for t in about.get("layout", ())
            )
            model = Model(np.load(path, allow_pickle=False), layout, metadata_of(about))
        else:
            model, about = read_weights(path)
        profile = _profile(about.get("profile"))
    except NoModel as error:
        raise CannotStart(str(error)) from None
    except UNREADABLE as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise CannotStart(f"{path}: no model can be read from it: {shortened(why, 300)}") from None
    # A threshold is that of one model, and the session makes others.
    known = {key: text for key, text in model.metadata.items() if key != THRESHOLD_KEY}
    model = replace(model, metadata=known)
    vector, layout = model.vector, model.layout
    is_bytes = vector.dtype.name == BYTES
    is_vector = vector.ndim == 1 and len(vector) > 0
    if not is_vector or not (is_bytes or np.issubdtype(vector.dtype, np.floating)):
        raise CannotStart(
            f"{path}: a model is one vector of floating-point numbers, and this is an array of "
            f"{vector.dtype} with the shape {vector.shape}"
        )
    if layout and not is_bytes and size_of(layout) != len(vector):
        raise CannotStart(
            f"{path}: it has {len(vector)} numbers, and its layout needs {size_of(layout)}"
        )
    if not is_bytes and not np.isfinite(vector).all():
        raise CannotStart(f"{path}: not all of its numbers are finite")
    return model, profile


def _sidecar(path: Path) -> Mapping[str, Any]:
    """The JSON object in the file beside a model, or else in its folder's index; empty without
    both. Raises ValueError."""
    for beside in (path.with_suffix(SIDECAR), path.with_name(MODELS_INDEX)):
        if beside.exists():
            about = read_json(beside)
            if not isinstance(about, dict):
                raise ValueError(f"{beside} is not a JSON object")
            return about
    return {}


def _profile(about: Any) -> DataProfile | None:
    """The data profile in a JSON object; None without one. Raises KeyError, TypeError and
    ValueError."""
    if about is None:
        return None
    return DataProfile(
        num_samples=1,  # a profile without rows would be passed over
        num_features=int(about["num_features"]),
        classes=tuple(map(str, about.get("classes", ()))),
        columns=tuple(
            Column(str(c["name"]), c["type"], str(c["unit"])) for c in about.get("columns", ())
        ),
        target=str(about.get("target", "")),
        task=str(about.get("task", "")),
    )


def _without_remedy(own: Mapping[str, Any], config: CoordinatorConfig) -> dict[str, Any]:
    """Options of a model, without its remedy where the configuration sets one, or "" for none."""
    is_set = "remedy" in config.workload.model_fields_set
    return {key: value for key, value in own.items() if not (is_set and key in REMEDY)}


def _personal(
    first: FirstModel, options: Mapping[str, Any], config: CoordinatorConfig
) -> tuple[str, ...]:
    """Patterns of the tensors that stay at the sites, if the settings or the options of the
    training name some. Raises CannotStart."""
    patterns = tuple(config.model.personal)
    if config.workload.name and not patterns and options.get("remedy") == "personal":
        made: Any = create(config.workload.name, options)
        patterns = tuple(made.personal)
    try:
        # The model of a script has no tensors that were personal when it was made.
        known = personal_patterns(first.metadata)
        added = [one for one in patterns if one not in known]
        if added and first.layout:
            names = [spec.name for spec in first.layout if spec.kind != "control"]
            require_personal(names, added)
    except ValueError as error:
        raise CannotStart(f"{first.lineage.source}: {error}") from None
    return patterns


def _require_fit(first: FirstModel, config: CoordinatorConfig) -> None:
    """Check that the configured workload can go on with the model. Raises CannotStart."""
    name, source = config.workload.name, first.lineage.source
    if config.storage.format == "xain-pickle":
        raise CannotStart(
            'storage.format = "xain-pickle": XAIN\'s participants know one session a bucket'
        )
    made_by = first.metadata.get("workload", "")
    try:
        own = json.loads(first.metadata.get("options", "{}"))
        options = _without_remedy(own, config) | config.workload.whole_options
    except (ValueError, TypeError, AttributeError) as error:
        raise CannotStart(f"{source}: its options are not usable: {error}") from None
    # Participants send gradients if the model's options say so, whatever the rule takes.
    takes_gradients = config.aggregation.rule == "gradient"
    has_gradients = options.get("mode") == "gradient"
    if has_gradients and not takes_gradients:
        raise CannotStart(
            f'{source} trains in the mode "gradient"; '
            + hint("xain-coordinator", 'aggregation.rule = "gradient"')
            + ", or "
            + hint("xain-coordinator", 'workload.options.mode = "federated"')
        )
    if made_by and takes_gradients and not has_gradients:
        raise CannotStart(
            f"{source} trains models, and aggregation.rule takes gradients; "
            + hint("xain-coordinator", 'workload.options.mode = "gradient"')
        )
    if not name:
        return
    if made_by != name:
        is_of = f"is a model of the workload {made_by!r}" if made_by else "names no workload"
        raise CannotStart(f"{source} {is_of}, and workload.name is {name!r}")
    if not first.profiles:
        raise CannotStart(
            f"{source}: nothing tells how many features and which classes it was trained for; "
            f'give them as "profile" in {MODELS_INDEX} beside it'
        )
    try:
        create(name, options)
    except ValueError as error:
        asked = config.given().get("workload", {}).get("options", {})
        if has_gradients and "mode" not in asked and own.get("mode") != "gradient":
            raise CannotStart(
                f"{source} was trained locally, and no setting asks for that: "
                + hint("xain-coordinator", 'workload.options.mode = "federated"')
            ) from None
        raise CannotStart(f"{source}: its options are not usable: {error}") from None
    if name == "bagging" and own.get("publish") != config.workload.options.get("publish", False):
        told = str(bool(own.get("publish"))).lower()
        raise CannotStart(f"{source} was made with workload.options.publish = {told}; keep it")
    mode = mode_option(config.rules()).get("mode")
    made_in = own.get("mode", "bagging")
    if mode == "histogram" and made_in != mode:
        raise CannotStart(
            f"{source} was trained in the mode {made_in!r}, and has no bins to grow trees from; "
            + hint("xain-coordinator", f'aggregation.options.mode = "{made_in}"')
        )
