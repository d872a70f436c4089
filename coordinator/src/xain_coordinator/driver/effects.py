"""Effects of a session: the initial model, aggregation, evaluation, metrics.

Heavy work runs in threads, off the event loop. A store that is away is waited for: the session
stays where it is and goes on when the store is back. What a person can put right, such as weights
that are missing, ends the process and not the session: started again on what it needs, it does the
work then. Only what would fail for ever ends the session.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from xain_coordinator.aggregation.aggregator import RuleFailed, Stopped
from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.aggregation.publishing import publish
from xain_coordinator.aggregation.rules import RULES
from xain_coordinator.aggregation.sources import UpdateChanged
from xain_coordinator.core.parts.attempts import RULE as ASSEMBLE
from xain_coordinator.core.vocabulary.commands import (
    AggregationDone,
    CentralDone,
    Command,
    EffectFailed,
    EvaluationDone,
    InitialisationDone,
    InitialisationFailed,
    NoteDamagedUpdates,
)
from xain_coordinator.core.vocabulary.effects import (
    Aggregate,
    Effect,
    EvaluateModel,
    FitCentral,
    InitialiseModel,
    RecordMetrics,
)
from xain_coordinator.core.vocabulary.errors import StaleModel, Unavailable
from xain_coordinator.core.vocabulary.keys import PREPROCESSING, TABLE_ONE, model_key
from xain_coordinator.core.vocabulary.values import (
    BYTES,
    CentralModel,
    DataProfile,
    Evaluation,
    GlobalModel,
    LocalModel,
    Phase,
)
from xain_coordinator.driver.driver import Driver, Made
from xain_coordinator.driver.outage import Outage
from xain_coordinator.driver.rebuilding import rebuild_damaged_model
from xain_coordinator.extensions.plugins import PluginFailed
from xain_coordinator.ports import (
    KeyNotFound,
    MetricsStore,
    StoreError,
    StoreUnavailable,
    WeightsStore,
)
from xain_coordinator.stores.integrity import damaged_updates
from xain_coordinator.stores.journalled import JournalledStore
from xain_coordinator.stores.memory import MemoryStore
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.logs.logger import get_logger
from xain_foundation.names import brief
from xain_foundation.net.backoff import Backoff
from xain_foundation.settings.hints import hint
from xain_wire.np import npy_header
from xain_workloads.errors import DataError
from xain_workloads.model import PERSONAL, Model, require_personal
from xain_workloads.tables.checks.findings import Finding
from xain_workloads.tables.preprocessing import PreprocessingOptions, preprocessing_of
from xain_workloads.workload import DEFAULT_PREPROCESSING, Workload, initial_model, trains

if TYPE_CHECKING:
    from xain_coordinator.driver.own_evaluation import Types
    from xain_workloads.exported.formats import Exported
    from xain_workloads.tables.table import Table

log = get_logger(__name__)

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 10.0

# A made model of up to this size stays in memory for the participants that ask for it.
SMALL_MODEL_BYTES = 64 << 10

# The updates of a round, and the model that they are for, up to which the next model is made at
# once.
AT_ONCE_BYTES = 256 << 10

MAX_REFUSALS = 5  # in the reason why no model can be made
MAX_REASON = 240  # characters
MAX_LOGGED = 50  # findings in the data; status has more

_NOTHING = np.empty((0,), np.float32)  # the empty model


def checks_off(workload: Workload | None) -> Mapping[str, str]:
    """Checks of the data that are off for a workload: that of unlike classes, if the workload
    trains and is not a federated one without a remedy, since its advice would not help."""
    options = getattr(workload, "options", None)
    is_averaged = getattr(options, "mode", "") == "federated"
    is_told = is_averaged and not getattr(options, "remedy", "")
    if workload is None or not trains(workload) or is_told:
        return {}
    return {"unlike_classes": "off"}


class StoreWorker:
    """Worker that runs effects on a weights store and a metrics store.

    workload: makes the initial model; None where the participants bring it.
    preprocessing: how columns are prepared for it.
    publish_further: puts a new model where else it is looked for, before it is announced; in a
        thread, and again after a crash.
    require_owner: called before a model is made at once; raises StoreError if another coordinator
        has taken over the session.
    own_data: reads the data that the coordinator evaluates models on; None if there are none.
    keep_central: writes the central model to a file, in a thread, and returns its path; None: no
        file is written.
    checks: levels of the checks of the data, by name.
    min_sites: that a figure of all data must have where participants see it. model_sites: that a
        figure in the metadata of a model must have, which go to all that may read it.
    personal: patterns of the names of tensors that each participant keeps for itself.
    first_retry_s: how long to wait for a store that is away; each time twice as long.
    trouble: what the store last said, "" once work has succeeded again. outage: the same for the
        log, shared with the calls that need the store.
    """

    # Models that wait in the journal to be copied to the store, up to which another one is made at
    # once. A store that is slower than the rounds then slows them down.
    max_uncopied = 1_000
    verify_again_s = 60.0  # between two verifications of the model that participants ask for

    def __init__(
        self,
        driver: Driver,
        store: JournalledStore,
        metrics: MetricsStore,
        workload: Workload | None,
        *,
        preprocessing: PreprocessingOptions = DEFAULT_PREPROCESSING,
        publish_further: Callable[[GlobalModel], None] | None = None,
        require_owner: Callable[[], None] = lambda: None,
        own_data: "Callable[[Types], Table] | None" = None,
        keep_central: "Callable[[Exported], str] | None" = None,
        personal: Sequence[str] = (),
        checks: Mapping[str, str] = MappingProxyType({}),
        min_sites: int = 2,
        model_sites: int = 1,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self.trouble = ""
        self.outage = Outage()
        self._driver = driver
        self._store = store
        self._metrics = metrics
        self._workload = workload
        self._preprocessing = preprocessing
        self._publish_further = publish_further
        self._require_owner = require_owner
        self._own_data = own_data
        self._keep_central = keep_central
        self._personal = tuple(personal)
        self._checks = checks
        self._min_sites, self._model_sites = min_sites, model_sites
        self._first_retry_s = first_retry_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_verifying = False
        self._verified_at: float | None = None
        self._made_model = ("", b"")  # the key and the bytes of the latest, if it is small
        self._stop = threading.Event()  # for the threads
        self._closing = asyncio.Event()  # the same, for tasks that wait for a store

    def perform(self, effect: Effect) -> None:
        """Start an effect in a task; metric points are written here, with the session's id as a
        tag. Its result is submitted to the driver as a command."""
        match effect:
            case RecordMetrics(points):
                # A tag, since every question about a series is about one session, and a database
                # looks tags up in an index.
                tags = {"session": self._driver.session.session_id}
                now = self._driver.clock.wall_ns()
                self._metrics.write(
                    [replace(p, tags={**p.tags, **tags}, at_ns=p.at_ns or now) for p in points]
                )
            case InitialiseModel():
                self._begin("initialise", lambda: self._initialise(effect))
            case Aggregate():
                self._begin("aggregate", lambda: self._aggregate(effect))
            case EvaluateModel():
                self._begin("evaluate", lambda: self._evaluate(effect.model))
            case FitCentral():
                self._begin("central", lambda: self._fit_central(effect))
            case _:
                raise AssertionError(f"nobody does {effect}")

    def make_at_once(self, effect: Aggregate, objects: Mapping[str, bytes]) -> Made | None:
        """Make a small model on the event loop, of updates in memory; None if a thread has to. The
        updates and the model that they change together have AT_ONCE_BYTES at most, which takes a
        fraction of a millisecond; a thread, a file and a transaction of its own would take
        several."""
        refs = [update.weights.ref for update in effect.updates]
        if not effect.base.is_empty:
            refs.append(effect.base.ref)
        is_small = sum(ref.size_bytes for ref in refs) <= AT_ONCE_BYTES
        is_plain = not (effect.optimizer or effect.base.dtype == BYTES or effect.rule == ASSEMBLE)
        # A rule of a plug-in may take any time, and so may a store far away whose owner is asked.
        is_quick = effect.rule in RULES and self._store.num_parallel == 1
        if not (is_small and is_plain and is_quick) or self._publish_further is not None:
            return None
        if self._store.num_models >= self.max_uncopied:
            return None
        recent = self._store.journal.recent_object
        at_hand = {
            ref.key: objects.get(ref.key) or self.made_model(ref.key) or recent(ref.key) or b""
            for ref in refs
        }
        if not all(at_hand.values()):
            return None
        memory = MemoryStore(at_hand)
        try:
            self._require_owner()
            model = aggregate(memory, effect)
        except (StoreError, RuleFailed):
            return None  # the thread finds the same, and knows what to do
        except Exception:
            # The thread fails loudly if this was no accident; the event loop must go on.
            log.exception("model_not_made_at_once", round=effect.round)
            return None
        with memory.open(model.ref.key) as reader:
            data = reader.read(0, model.ref.size_bytes)
        self._made_model = model.ref.key, data
        self._store.add_model(model.ref.key)
        return Made(AggregationDone(model), {model.ref.key: data})

    def _begin(self, name: str, work: Callable[[], Command]) -> None:
        """Start work of this name, unless the worker is closing: the next start does it then."""
        if self._closing.is_set():
            return  # the next start does it
        self._spawn(self._run(name, work))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task of its own, which close() waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, name: str, work: Callable[[], Command]) -> None:
        """Do work of this name, and submit the command that it results in."""
        async with self._guarded(name) as round_:
            command = await self._work_until_done(name, round_, work)
            await self._driver.submit(command)

    @contextlib.asynccontextmanager
    async def _guarded(self, name: str) -> AsyncIterator[int]:
        """Log whatever ends work of this name before it is done; errors that need a person, and
        defects, end the driver. Gives the round."""
        round_ = self._driver.session.round
        try:
            yield round_
        except Stopped:
            log.info("work_stopped", work=name, round=round_)
        except (Unavailable, StaleModel) as refusal:
            log.info("work_not_needed", work=name, round=round_, reason=str(refusal))
        except (StoreError, CommandFailed, PluginFailed) as error:
            self._driver.fail(error)
        except Exception as error:
            # A defect of ours must end the process loudly, not leave the round hanging.
            log.exception("effect_crashed", work=name, round=round_)
            self._driver.fail(error)

    async def _work_until_done(
        self, name: str, round_: int, work: Callable[[], Command]
    ) -> Command:
        """Run an effect in a thread, again after errors of the store, until it is done or cannot
        be. Raises Stopped, every StoreError but StoreUnavailable, and unexpected errors."""
        backoff = Backoff(self._first_retry_s, LAST_RETRY_S)
        while not self._closing.is_set():
            if self._driver.session.phase is Phase.FINISHED:
                # The session has ended by itself, as after the idle timeout: there is no trouble
                # either.
                self.trouble = ""
                break
            try:
                command = await asyncio.to_thread(work)
            except StoreUnavailable as error:
                self.trouble = str(error)
                self.outage.note_failure(name, error, work=name, round=round_)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await self._closing.wait()
            except StoreError as error:
                self.trouble = str(error)
                raise
            except RuleFailed as error:
                log.error("work_failed", work=name, round=round_, error=str(error))
                return EffectFailed(f"{name} failed in round {round_}: {error}")
            else:
                self.trouble = ""
                self.outage.note_success(name)
                return command
        raise Stopped

    async def close(self) -> None:
        """Stop: no waiting for a store any more, and a thread ends after its tile. The next start
        does the work again."""
        self._stop.set()
        self._closing.set()
        await asyncio.gather(*self._tasks)

    # --- the published model ---

    def rebuild_damaged(self) -> bool:
        """Compare the session's model with its digest, and rebuild it if it is damaged. Blocks.
        Returns whether it was damaged. Raises StoreError, Fenced and Stopped."""
        driver = self._driver
        models = driver.history.models
        return rebuild_damaged_model(
            self._store, driver.session, models, self._make, self._raise_if_stopped
        )

    def verify(self) -> bool:
        """Start to verify the model, since a participant reports that it is damaged. Returns False
        if it was verified less than verify_again_s ago; True while it is verified."""
        now = asyncio.get_running_loop().time()
        if self._is_verifying or self._closing.is_set():
            return True
        if self._verified_at is not None and now < self._verified_at + self.verify_again_s:
            return False
        self._is_verifying = True
        self._made_model = ("", b"")
        self._spawn(self._verify())
        return True

    def made_model(self, key: str) -> bytes:
        """The bytes of the model under this key; nothing if it is large, was not made by this
        process, or was verified since."""
        made_key, data = self._made_model
        return data if key == made_key else b""

    async def _verify(self) -> None:
        """Verify the model in a thread, and rebuild it if it is damaged. A store that is away ends
        this attempt."""
        async with self._guarded("verify") as round_:
            try:
                await asyncio.to_thread(self.rebuild_damaged)
                self.outage.note_success("verify")
            except StoreUnavailable as error:
                self.outage.note_failure("verify", error, work="verify", round=round_)
            finally:
                self._is_verifying = False
                self._verified_at = asyncio.get_running_loop().time()

    def _make(self, store: WeightsStore, effect: Effect) -> None:
        """Do the work of an effect in a store, which may be one that rebuilds. Raises ValueError
        where no initial model can be made, and what aggregate() raises."""
        if isinstance(effect, InitialiseModel):
            try:
                model = self._initial_model(effect)
            except CommandFailed as error:
                raise ValueError(str(error)) from error
            store_model(store, 0, model)
        elif isinstance(effect, Aggregate):
            aggregate(store, effect, self._stop)

    def _initial_model(self, effect: InitialiseModel) -> Model:
        """The initial model, with the names of the tensors that each participant keeps for itself.
        Raises CommandFailed, and ValueError where the profiles do not suffice."""
        model = self._model_of(effect)
        if not self._personal:
            return model
        if model.layout:
            require_personal([spec.name for spec in model.layout], self._personal)
        metadata = {**model.metadata, PERSONAL: json.dumps(self._personal)}
        return replace(model, metadata=metadata)

    def _model_of(self, effect: InitialiseModel) -> Model:
        """The model that the workload makes for the profiles of an effect; the empty one where
        participants make the initial weights. Raises CommandFailed, and ValueError where the
        profiles do not suffice."""
        if effect.initial != "workload":
            return Model(_NOTHING, ())
        if self._workload is None:
            raise CommandFailed(
                "the session has no initial model yet and needs a workload to make it: "
                + hint("xain-coordinator", 'workload.name = "NAME"')
                + ", the one that the session was opened with"
            )
        profiles = [profile for _, profile in _by_name(effect)] or effect.profiles
        return initial_model(
            self._workload, profiles, self._preprocessing, effect.made, self._model_sites
        )

    # --- effects ---

    def _initialise(self, effect: InitialiseModel) -> Command:
        """Check the data, and make and store the initial model. InitialisationFailed if the data do
        not suffice. Raises CommandFailed and StoreError."""
        findings: tuple[Finding, ...] = ()
        try:
            if effect.names and len(effect.names) < self._model_sites:
                raise DataError(
                    f"the model would tell the statistics of {len(effect.names)} site to others, "
                    f"and schema.min_sites is {self._model_sites}: let another site join, or "
                    + hint("xain-coordinator", "schema.min_sites = 1")
                )
            findings = self._findings(effect)
            refusals = [str(one) for one in findings if one.level == "refuse"]
            if refusals and self._workload is not None and trains(self._workload):
                raise DataError("; ".join(refusals[:MAX_REFUSALS]))
            model = self._initial_model(effect)
        except ValueError as error:
            # The data that have come so far do not suffice; the session knows what to do.
            log.warning("initialisation_failed", round=0, error=str(error))
            return InitialisationFailed(str(error), findings)
        self._record_preprocessing(model)
        stored = self._publish_elsewhere(store_model(self._store, 0, model))
        return InitialisationDone(stored, findings)

    def _findings(self, effect: InitialiseModel) -> tuple[Finding, ...]:
        """Check the data that the model is made for: store table one, log and return the findings.
        Raises DataError."""
        if not effect.names:
            return ()
        from xain_workloads.tables.checks.checking import check
        from xain_workloads.tables.checks.describe import OF_TWO, TableOne

        sites = _by_name(effect)
        table = TableOne.of(sites)
        self._record(TABLE_ONE, table.to_json().encode())
        if table.num_sites == 2:
            log.info("two_sites", round=0, reason=OF_TWO)
        levels = {**checks_off(self._workload), **self._checks}
        findings = check(sites, levels, self._model_sites)
        for finding in findings[:MAX_LOGGED]:
            tell = log.info if finding.level == "note" else log.warning
            tell(
                "data_finding",
                round=0,
                participant=finding.site or "all",
                check=finding.check,
                column=finding.column,
                reason=finding.text,
                hint=finding.fix,
            )
        if len(findings) > MAX_LOGGED:
            log.warning("data_findings", round=0, not_logged=len(findings) - MAX_LOGGED)
        return findings

    def _record_preprocessing(self, model: Model) -> None:
        """Store the preprocessing beside the models, as people read it. The model's metadata hold
        the same for programs."""
        preprocessing = preprocessing_of(model.metadata)
        if preprocessing is None:
            if self._workload is not None and trains(self._workload):
                log.warning(
                    "no_preprocessing",
                    round=0,
                    hint="a participant sent no statistics of its columns, so nothing is scaled",
                )
            return
        self._record(PREPROCESSING, preprocessing.to_readable_json().encode())

    def description(self) -> str:
        """JSON of what the data of all participants are together, as participants may see it; ""
        before the first model is made. Blocks. Raises StoreError and DataError.

        Later participants are not in the table. Those that come after a failed attempt to make the
        model are: with that attempt's table, their figures could be computed by subtraction.
        """
        if self._driver.session.model is None:
            return ""
        from xain_workloads.tables.checks.describe import TableOne

        try:
            with self._store.open(TABLE_ONE) as reader:
                text = reader.read(0, reader.size).decode()
        except KeyNotFound:
            return ""
        return TableOne.from_json(text).for_sites(self._min_sites).to_json()

    def _record(self, key: str, data: bytes) -> None:
        """Store an object that people read beside the models, in place of the one that is there."""
        upload = self._store.upload(key)
        try:
            upload.write(data)
            upload.commit(overwrite=True)
        finally:
            upload.abort()

    def _aggregate(self, effect: Aggregate) -> Command:
        """Make and store the model of a round: AggregationDone, or NoteDamagedUpdates if updates
        are damaged. A damaged base model is rebuilt first. Raises StoreError, RuleFailed and
        Stopped."""
        try:
            model = aggregate(self._store, effect, self._stop)
        except UpdateChanged:
            damaged = damaged_updates(self._store, effect.updates, self._raise_if_stopped)
            if damaged:
                return NoteDamagedUpdates(damaged)
            if not self.rebuild_damaged():
                raise
            model = aggregate(self._store, effect, self._stop)
        if model.ref.size_bytes <= SMALL_MODEL_BYTES:
            with self._store.open(model.ref.key) as reader:
                self._made_model = model.ref.key, reader.read(0, model.ref.size_bytes)
        return AggregationDone(self._publish_elsewhere(model))

    def _evaluate(self, model: GlobalModel) -> Command:
        """Measure a model on the coordinator's own data: EvaluationDone. After a failure, which is
        logged, that has the reason instead of an evaluation."""
        from xain_coordinator.driver.own_evaluation import evaluate_stored

        try:
            evaluation = evaluate_stored(self._store, model, self._require_own_data())
            return EvaluationDone(model.round, evaluation)
        except StoreUnavailable:
            raise
        except Exception as error:  # the workload's code, which may raise anything
            reason = _reason(error)
            log.warning("evaluation_failed", round=model.round, reason=reason)
            return EvaluationDone(model.round, None, reason)

    def _fit_central(self, effect: FitCentral) -> Command:
        """Train the central model, compare a global model with it, and keep its file: CentralDone.
        After a failure, which is logged, that has the reason alone."""
        from xain_coordinator.driver.own_evaluation import fit_central

        number, file, began = effect.round, "", time.monotonic()
        try:
            model = self._driver.history.models[model_key(number)]
            load = self._require_own_data()
            evaluation, exported = fit_central(self._store, model, load, effect.budget, self._clock)
            self._raise_if_stopped(0)  # the training was cut short
            if exported is not None and self._keep_central is not None:
                file = self._keep_central(exported)
        except (StoreUnavailable, Stopped):
            raise
        except Exception as error:  # as above
            reason = brief(_reason(error), MAX_REASON)
            evaluation = Evaluation(0, {}, local=LocalModel(why_not=reason))
        fields = {"round": number, "seconds": round(time.monotonic() - began, 3)}
        if evaluation.local is not None and evaluation.local.why_not:
            log.warning("no_central_model", **fields, reason=evaluation.local.why_not)
        else:
            log.info("central_model", **fields, file=file)
        return CentralDone(CentralModel(number, evaluation, file))

    def _clock(self) -> float:
        """Time in seconds for a training, infinite once the worker is closed, so that the training
        ends early."""
        return inf if self._stop.is_set() else time.monotonic()

    def _require_own_data(self) -> "Callable[[Types], Table]":
        """The function that reads the coordinator's own data. Raises DataError if none is
        configured."""
        if self._own_data is None:
            raise DataError("[evaluate] data is not set, and the session was opened with it")
        return self._own_data

    def _raise_if_stopped(self, num_bytes: int) -> None:
        """Raise Stopped once the worker is closed. Called after each piece of a long read."""
        if self._stop.is_set():
            raise Stopped

    def _publish_elsewhere(self, model: GlobalModel) -> GlobalModel:
        """Publish a stored model in a second place, if one is configured; return it."""
        if self._publish_further is not None:
            self._publish_further(model)
        return model


def _reason(error: Exception) -> str:
    """Why an evaluation failed, as text; the type of the error is named unless its message
    suffices."""
    says_why = isinstance(error, DataError | StoreError)
    return str(error) if says_why else f"{type(error).__name__}: {error}"


def _by_name(effect: InitialiseModel) -> list[tuple[str, DataProfile]]:
    """Names and profiles in the order of the names, so that table one, findings and the model do
    not depend on the order of arrival; none for profiles without names."""
    if not effect.names:
        return []
    return sorted(zip(effect.names, effect.profiles, strict=True), key=itemgetter(0))


def store_model(store: WeightsStore, round_: int, model: Model) -> GlobalModel:
    """Publish a model that is in memory as the one that `round_` starts from."""
    vector = model.vector.astype(model.vector.dtype.newbyteorder("<"), copy=False)
    header = npy_header(vector.dtype, vector.shape)
    ref = publish(store, model_key(round_), [header, vector.tobytes()])
    return GlobalModel(
        round=round_,
        ref=ref,
        dtype=vector.dtype.name,
        shape=vector.shape,
        layout=model.layout,
        metadata=dict(model.metadata),
    )
