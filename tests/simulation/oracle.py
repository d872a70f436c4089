"""Invariants of every run.

The oracle reads every transaction of the journal and every object of the store as it becomes
durable, hears what participants hear, and sees what they train. It knows only what is durable, so
whoever is told more than it knows has been told too early.
"""

import io
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from oracle.rounds import ROUNDING_S, Rounds
from simulation.aggregation import Aggregation
from simulation.disk import StoreDisk
from simulation.hub import Hub
from simulation.plan import configuration_of, ends_at, epochs_of, settings_of
from simulation.scenario import Kind, Scenario
from xain_coordinator.core.machine.evolve import begin, evolve
from xain_coordinator.core.machine.needed import models_in_use
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import (
    Evaluation,
    GlobalModel,
    Phase,
    Rules,
    Task,
    Update,
    WeightsRef,
)
from xain_coordinator.ports import Record
from xain_foundation.names import GLOBAL
from xain_wire.fl import access_pb2 as access_pb
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.np import npy_header
from xain_workloads import scaffold
from xain_workloads.model import CONTROL_LOST, Layout, Model, TensorSpec

Vector = NDArray[Any]

# How late a tick may be; and behind a journal that is slow, or frozen with its coordinator.
LATE_S = 1.0
LATE_FOR_DISK_S = 15.0

TILE_ELEMENTS = 4  # of an encoding, so that a model of a few floats has several


class Oracle:
    """session: what the journal folds to; None before it has begun."""

    def __init__(self, hub: Hub, scenario: Scenario, store: StoreDisk) -> None:
        self.session: Session | None = None
        self.models: dict[str, bytes] = {}  # published ones, by key
        self._removed: set[str] = set()  # keys of those that may be gone
        self._hub = hub
        self._scenario = scenario
        self._store = store
        self._rounds: Rounds | None = None
        self._aggregation: Aggregation | None = None
        slow = (Kind.SLOW_DISK, Kind.JOURNAL_FAILS, Kind.OVERTAKE)
        is_slow = any(fault.kind in slow for fault in scenario.faults)
        self._late_s = LATE_FOR_DISK_S if is_slow else LATE_S
        self._at = 0.0
        # Session time of the last start, and of the signs of life since then.
        self._started_at = 0.0
        self._heard_at: defaultdict[str, list[float]] = defaultdict(list)
        self._phase = Phase.STANDBY
        self._since = 0.0
        self.journalled: Callable[[str], bytes | None] = lambda key: None  # a small update or model
        self._opened: set[int] = set()
        # Decisions of the script: rounds, and models.
        self._configured: set[int] = set()
        self._measured: set[int] = set()
        self._joined: set[str] = set()
        self._members: set[str] = set()
        # By participant and the round it was trained for: digests.
        self._accepted: dict[tuple[str, int], str] = {}
        self._trained: dict[tuple[str, int], list[str]] = {}
        self._acknowledged: set[tuple[str, int]] = set()
        self._updates: list[tuple[Update, int]] = []  # of the open round, with their staleness
        self._variates = Variates(scenario)

    @property
    def is_finished(self) -> bool:
        return self.session is not None and self.session.phase is Phase.FINISHED

    def score_of_model(self, number: int) -> float:
        return score_of(_vector(self.models[model_key(number)]))

    def has_counted(self, participant_id: str) -> bool:
        """Whether an update or an evaluation of the participant was accepted."""
        return any(name == participant_id for name, _ in self._accepted)

    def fail(self, text: str) -> None:
        self._hub.fail(text)

    # --- the journal ---

    def committed(self, records: Sequence[Record]) -> None:
        """A transaction is durable."""
        for record in records:
            if record.at < self._at:
                self.fail(f"session time went back from {self._at} to {record.at}")
            self._at = record.at
            try:
                self._take(record)
            except AssertionError as error:
                self.fail(f"{type(record.event).__name__} does not follow: {error}")
        self._check_waiting()
        try:
            self._rounds.settled(self._at)
        except AssertionError as error:
            self.fail(f"something else must follow: {error}")

    def _take(self, record: Record) -> None:
        event, session = record.event, self.session
        if isinstance(event, e.SessionOpened):
            assert session is None, "a second session"
            self.session = begin(event)
            self._rounds = Rounds(event)
            return
        assert session is not None, "the session has not begun"
        if isinstance(event, e.ModelsRemoved):
            in_use = models_in_use(session).intersection(event.rounds)
            assert not in_use, f"models {in_use} are in use, and are removed"
            self._removed |= {model_key(round_) for round_ in event.rounds}
            return
        assert session.phase is not Phase.FINISHED, "the session was finished"
        self._rounds.take(event, record.at)
        match event:
            case e.ParticipantJoined(participant_id):
                self._joined.add(participant_id)
                self._members.add(participant_id)
                self._heard_at[participant_id].append(record.at)
            case e.ParticipantLeft(participant_id, "expired"):
                self._members.discard(participant_id)
                # A heartbeat is answered without waiting for the disk; a record comes here when it
                # is durable. While the disk is slow, a participant may expire, join again and send
                # a heartbeat before its expiry is durable. Heartbeats later than the expiry renew
                # the lease of the second membership, so they do not count for the first.
                heard = [at for at in self._heard_at[participant_id] if at <= record.at]
                ends = max([self._started_at, *heard]) + session.rules.lease_s - ROUNDING_S
                assert record.at >= ends, f"{participant_id} has a lease until {ends}"
                assert not self._scenario.is_quiet, f"{participant_id} was never away"
            case e.ParticipantLeft(participant_id):
                self._members.discard(participant_id)
            case e.ModelInitialised(model):
                self._published(model)
            case e.RoundOpened(number):
                assert number not in self._opened, f"round {number} was opened before"
                self._opened.add(number)
                self._updates = []
                self._variates.is_lost = False
            case e.UpdateAccepted(number, update, staleness, metrics, evaluation):
                self._accept(number, update, staleness)
                self._variates.is_lost |= CONTROL_LOST in metrics
                if evaluation is not None:
                    self._check_evaluation(number - staleness, evaluation)
            case e.RoundConfigured(number, config):
                assert number not in self._configured, f"round {number} is configured twice"
                decided = configuration_of(self._scenario, number)
                assert dict(config.site_epochs) == dict(decided.site_epochs)
                assert (config.epochs, config.selected) == (decided.epochs, (*decided.selected,))
                self._configured.add(number)
                self._since = record.at  # the wait for the script is over
            case e.ScriptEvaluated(number, evaluation):
                assert number not in self._measured, f"model {number} is evaluated twice"
                self._check_evaluation(number, evaluation)
                self._measured.add(number)
            case e.EvaluationAccepted(number, participant_id, evaluation):
                of_round = (participant_id, number)
                assert of_round not in self._accepted, f"{of_round} counts twice"
                self._check_evaluation(number, evaluation)
                self._accepted[of_round] = ""
            case e.ModelPublished(number, model):
                self._check_model(session, number, model)
                self._published(model)
        self.session = evolve(session, event)

    def _check_waiting(self) -> None:
        """Nothing waits for longer than the rules say."""
        session = self.session
        rules, round_ = session.rules, session.open_round
        if session.phase is not self._phase or session.waits_for_script:
            self._phase, self._since = session.phase, self._at
        waits_s, limit_s = self._at - self._since, rules.idle_timeout_s
        if session.phase is Phase.COLLECTING:
            is_overdue = round_.overdue_at is not None
            began = round_.opened_at if round_.overdue_at is None else round_.overdue_at
            waits_s = self._at - began
            limit_s = rules.idle_timeout_s if is_overdue else rules.deadline_s
            if round_.task is Task.EVALUATE:
                limit_s = rules.evaluate_deadline_s
        assert limit_s is not None
        if session.phase is not Phase.FINISHED and waits_s > limit_s + self._late_s:
            self.fail(f"{session.phase} for {waits_s} s, the limit is {limit_s} s")

    def _accept(self, number: int, update: Update, staleness: int) -> None:
        participant_id, ref = update.participant_id, update.weights.ref
        of_round = (participant_id, number - staleness)
        assert of_round not in self._accepted, f"{of_round} counts twice"
        assert ref.digest in self._trained.get(of_round, ()), f"{of_round} was never trained"
        n_k = 0 if self.session.model.is_empty else num_samples_of(participant_id)
        assert update.num_samples == n_k, f"n_k is {update.num_samples}, not {n_k}"
        self._require_durable(ref)
        self._accepted[of_round] = ref.digest
        self._updates.append((update, staleness))

    def _check_evaluation(self, number: int, evaluation: Evaluation) -> None:
        expected = score_of(_vector(self.models[model_key(number)]))
        assert evaluation.metrics == {"accuracy": expected}, f"it is not that of model {number}"

    def _require_durable(self, ref: WeightsRef) -> None:
        data = self._stored(self._store.durable, ref.key)
        assert data is not None, f"{ref.key} is not durable"
        assert _digest(data) == ref.digest, f"{ref.key} is not what was accepted"

    def _stored(self, objects: Mapping[str, bytes], key: str) -> bytes | None:
        """Bytes under a key, in the store or in the journal."""
        data = self.journalled(key)
        return objects.get(key) if data is None else data

    def _published(self, model: GlobalModel) -> None:
        self._require_durable(model.ref)
        data = self._stored(self._store.durable, model.ref.key)
        assert data is not None, "it is durable"
        self.models[model.ref.key] = data

    def _check_model(self, session: Session, number: int, model: GlobalModel) -> None:
        base = session.model
        assert base is not None
        if self._aggregation is None:
            self._aggregation = _aggregation_of(session.rules)
        stored = partial(self._stored, self._store.durable)
        total = 0 if session.open_round is None else session.open_round.total_samples
        share = None
        if self._scenario.has_control and not base.is_empty:
            share = self._variates.share([update for update, _ in self._updates])
        expected = _combined(
            session.rules, self._aggregation, base, self._updates, total, stored, share
        )
        data = self._stored(self._store.visible, model.ref.key)
        assert data is not None, f"{model.ref.key} is not there"
        found = _vector(data)
        assert found.dtype == expected.dtype, "the dtype of the model has changed"
        assert found.tobytes() == expected.tobytes(), (
            f"the model of round {number} is {found}, it should be {expected}"
        )
        if share is not None:
            before = _vector(self.models[base.ref.key])
            updates = [update for update, _ in self._updates]
            self._variates.publish(number, before, found, updates, self._members)

    # --- the store ---

    def shown(self, key: str, data: bytes) -> None:
        """An object has become visible."""
        round_, _, name = key.partition("/")
        if name == GLOBAL and key not in self.models and not self._awaits_model(int(round_)):
            self.fail(f"{key} is there before the journal asks for it")
        if key in self.models and data != self.models[key]:
            self.fail(f"{key} was published, and is overwritten")

    def _awaits_model(self, number: int) -> bool:
        session = self.session
        if session is None:
            return False
        if number == 0:
            return session.requested is not None
        return session.phase is Phase.AGGREGATING and session.round == number - 1

    # --- the participants ---

    def heard(self, participant_id: str, method: str, request: bytes, answer: bytes) -> None:
        """An answer has arrived."""
        match method:
            case "Rendezvous":
                reply = pb.RendezvousResponse.FromString(answer).reply
                is_known = participant_id in self._joined or self.is_finished
                if reply == pb.ACCEPT and not is_known:
                    self.fail(f"{participant_id} was accepted, and is not in the journal")
            case "Heartbeat":
                self._advertised(participant_id, pb.HeartbeatResponse.FromString(answer))
            case "Watch":
                news = pb.WatchResponse.FromString(answer)
                self._advertised(participant_id, news)
                if news.HasField("work"):
                    self._assigned(participant_id, news.work)
            case "StartTrainingRound":
                work = pb.StartTrainingRoundResponse.FromString(answer)
                self._assigned(participant_id, work)
            case "EndTrainingRound":
                update = pb.EndTrainingRoundRequest.FromString(request)
                of_round = (participant_id, update.round)
                if self._accepted.get(of_round) != update.update.digest.hex():
                    self.fail(f"{of_round} was acknowledged, and is not in the journal")
                self._acknowledged.add(of_round)
            case "FollowScript":
                status = access_pb.FollowScriptResponse.FromString(answer)
                if status.HasField("configured"):
                    self._must_be_durable("round", status.configured.round, self._configured)
                if status.HasField("evaluated"):
                    self._must_be_durable("model", status.evaluated.model, self._measured)
                if status.is_finished and not self.is_finished:
                    self.fail("the script heard of the end, which is not in the journal")
            case "ConfigureRound":
                configured = access_pb.ConfigureRoundRequest.FromString(request)
                self._must_be_durable("round", configured.round, self._configured)
            case "RecordEvaluation":
                measured = access_pb.RecordEvaluationRequest.FromString(request)
                self._must_be_durable("model", measured.model, self._measured)

    def _must_be_durable(self, what: str, number: int, durable: set[int]) -> None:
        if number not in durable:
            self.fail(f"the decision for {what} {number} was acknowledged, and is not durable")

    def _advertised(
        self, participant_id: str, seen: pb.HeartbeatResponse | pb.WatchResponse
    ) -> None:
        if seen.state == pb.FINISHED and not self.is_finished:
            self.fail(f"{participant_id} heard of the end, which is not in the journal")
        if seen.state == pb.ROUND and seen.round not in self._opened:
            self.fail(f"{participant_id} heard of round {seen.round}, which is not in the journal")
        if seen.update_accepted:
            self._heard_of_acceptance(participant_id, seen.round)

    def _heard_of_acceptance(self, participant_id: str, round_: int) -> None:
        of_round = (participant_id, round_)
        if of_round not in self._accepted:
            self.fail(f"{of_round} was said to be accepted, and is not in the journal")
        self._acknowledged.add(of_round)

    def _assigned(self, participant_id: str, work: pb.StartTrainingRoundResponse) -> None:
        if work.round not in self._opened:
            self.fail(f"{participant_id} got work of round {work.round}, which is not open")
        model = self.models.get(work.model.key)
        if model is None or _digest(model) != work.model.digest.hex():
            self.fail(f"{participant_id} was given {work.model.key}, which is not published")
        if work.update_accepted:
            self._heard_of_acceptance(participant_id, work.round)
        if work.task == pb.TRAIN and work.round in self._configured:
            self._check_settings(participant_id, work)
        counted = work.counted_round if work.HasField("counted_round") else -1
        if not self._variates.may_be_told(participant_id, work.round, counted):
            self.fail(f"{participant_id} was told that its variate of round {counted} counted")

    def _check_settings(self, participant_id: str, work: pb.StartTrainingRoundResponse) -> None:
        settings = settings_of(self._scenario, work.round, participant_id)
        if json.loads(work.train_config or "{}") != settings:
            self.fail(f"{participant_id} was told {work.train_config}, and not {settings}")
        epochs = epochs_of(self._scenario, work.round, participant_id)
        if work.epochs != epochs:
            self.fail(f"{participant_id} was told {work.epochs} epochs, and not {epochs}")

    def trains(self, participant_id: str, round_: int) -> None:
        """Training begins."""
        if (participant_id, round_) in self._acknowledged:
            self.fail(f"{participant_id} trains round {round_} again, which was acknowledged")

    def begins_with(self, participant_id: str, weights: Vector) -> None:
        """Check the weights that training is given."""
        if _npy(weights) not in self.models.values():
            self.fail(f"{participant_id} trains a model that was never published")

    def trained(
        self, participant_id: str, round_: int, vector: Vector, base: Vector | None
    ) -> None:
        """Training has ended. base: the model that it began with, if there was one."""
        if base is not None:
            vector = sent(self._scenario, vector, base)
        digest = _digest(_npy(vector))
        self._trained.setdefault((participant_id, round_), []).append(digest)

    # --- the coordinator ---

    def lives(self, session: Session) -> None:
        """A coordinator goes on from this, or has come to it."""
        if self.session is not None and session != self.session:
            self.fail(f"the session is {session}, its journal folds to {self.session}")

    def answered(self, participant_id: str, method: str, at: float) -> None:
        """A coordinator has answered a call that came at this session time."""
        if method == "Heartbeat":
            self._heard_at[participant_id].append(at)

    def restored(self, session: Session, now: float) -> None:
        """A coordinator has read this from the journal, at this session time."""
        # It stands where the last record was written; heartbeats that came later are forgotten.
        self._started_at = now
        self._heard_at.clear()
        self.lives(session)
        refs = [session.model.ref] if session.model is not None else []
        if session.open_round is not None:
            refs += [update.weights.ref for update in session.open_round.updates.values()]
        for ref in refs:
            if self._stored(self._store.visible, ref.key) is None:
                self.fail(f"{ref.key} was accepted or published, and is gone")

    # --- the end ---

    def ended(self) -> None:
        """Nothing happens any more."""
        session = self.session
        if session is None or not self.is_finished:
            return  # the run has failed for that
        for key, data in self.models.items():
            found = self._stored(self._store.visible, key)
            if found != data and not (found is None and key in self._removed):
                self.fail(f"{key} was published, and is another one now")
        if session.cause != "completed":
            if not self._scenario.can_fail:
                self.fail(f"the session has failed: {session.cause}")
            return
        last = ends_at(self._scenario)
        if session.model.round != (session.rules.num_rounds if last < 0 else last):
            self.fail(f"the last model is number {session.model.round}")
        if self._scenario.needs_everybody:
            found = _vector(self.models[session.model.ref.key])
            expected = undisturbed(
                self._scenario, next(name for name, round_ in self._accepted if round_ == 0)
            )
            if found.tobytes() != expected.tobytes():
                self.fail(f"the last model is {found}, without faults it is {expected}")


class Variates:
    """The control variates of all sites, from the journal and from what training makes of a model.

    is_lost: whether a site whose update counts in the open round had lost its own.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.is_lost = False
        self._scenario = scenario
        # Round, n_k and variate of each site that has counted since all began anew.
        self._counted: dict[str, tuple[int, int, Vector]] = {}
        self._told: dict[tuple[str, int], int] = {}  # what each may be told, by round

    def share(self, updates: Sequence[Update]) -> float:
        ours = {update.participant_id: update.num_samples for update in updates}
        known = {name: n_k for name, (_, n_k, _) in self._counted.items()} | ours
        if sum(known.values()) == 0:
            return len(ours) / len(known)
        return sum(ours.values()) / sum(known.values())

    def publish(
        self,
        number: int,
        before: Vector,
        after: Vector,
        updates: Sequence[Update],
        members: Collection[str],
    ) -> None:
        """The model after a round: its last half is the mean of all variates by rows."""
        d = len(before) // 2
        for update in updates:
            name = update.participant_id
            variate = before[:d] - _drawn(before[:d], name, self._scenario)
            self._counted[name] = number, update.num_samples, variate
        rows = [n_k for _, n_k, _ in self._counted.values()]
        vectors = [variate for _, _, variate in self._counted.values()]
        mean = np.average(vectors, axis=0, weights=rows if any(rows) else None)
        scale = 1 + max(float(np.abs(one).max()) for one in (*vectors, before))
        near = scale * (1e-4 if after.dtype == np.float32 else 1e-11)
        if not self.is_lost:
            assert np.abs(after[d:] - mean).max() <= near, (
                f"the variate after round {number} is {after[d:]}, the mean of all is {mean}"
            )
        away = [n for n, (last, *_) in self._counted.items() if n not in members]
        if self.is_lost or any(number - self._counted[name][0] >= 10 for name in away):
            self._counted = {}
        for name in {*members, *self._counted}:
            self._told[name, number + 1] = self._counted.get(name, (-1,))[0]

    def may_be_told(self, name: str, round_: int, counted: int) -> bool:
        """Whether the round in which the variate of a participant counted last is this one."""
        return counted == self._told.get((name, round_), counted if counted < 0 else -1)


# --- what training and aggregation come to, slowly and obviously ----------------------------------


def participant_name(index: int) -> str:
    return f"p{index}"


def num_samples_of(participant_id: str) -> int:
    """n_k; one participant has none."""
    index = int(participant_id[1:])
    return (3, 0, 10, 1, 7)[index % 5] + index // 5


def score_of(weights: Vector) -> float:
    return float(np.tanh(np.abs(weights.astype(np.float64)).sum()))


def first_weights(scenario: Scenario, participant_id: str) -> Vector:
    """The initial weights of a participant, if the coordinator has none."""
    index = int(participant_id[1:])
    values = [(index + 1) * 0.37 + i * 0.11 for i in range(scenario.num_floats)]
    return np.array([*values, *_no_control(scenario)], scenario.dtype)


def _no_control(scenario: Scenario) -> list[float]:
    return [0.0] * scenario.num_floats if scenario.has_control else []


def layout_of(scenario: Scenario) -> Layout:
    """The layout of a model; only one with a control variate declares it."""
    if not scenario.has_control:
        return ()
    d = scenario.num_floats
    return (
        TensorSpec("w", (d,), scenario.dtype),
        TensorSpec("control", (d,), scenario.dtype, "control"),
    )


def _drawn(weights: Vector, participant_id: str, scenario: Scenario) -> Vector:
    """The vector that local training leads to without a correction."""
    own = 10.0 ** (int(participant_id[1:]) % 5 - 2)
    return np.tanh(weights.astype(np.float64) + own) * own


def corrected_weights(
    scenario: Scenario, model: Vector, participant_id: str, own: Vector | None
) -> tuple[Vector, Vector]:
    """The update of a participant of a model with a control variate, and its own variate.

    own: before, None: it has none.
    """
    layout = layout_of(scenario)
    variates = scaffold.Variates.of(Model(model, layout), own)
    inner = scaffold.without_control(Model(model, layout))
    trained = _drawn(inner.vector, participant_id, scenario) - variates.correction
    return variates.after(inner, trained.astype(model.dtype), 1.0)


def trained_weights(weights: Vector, participant_id: str, epochs: int, epoch_base: int) -> Vector:
    """The weights that a participant trains from a model: they depend on every input, and differ
    between any two participants. Their sizes differ, so that sums depend on their order."""
    index = int(participant_id[1:])
    x = weights.astype(np.float64)
    for epoch in range(epoch_base, epoch_base + epochs + 1):
        own = 10.0 ** (index % 5 - 2) * (1 + index // 5)
        x = np.clip(0.6 * x * x - 0.9 * x, -3.0, 3.0) + own / (epoch + 3)
    return x.astype(weights.dtype)


def sent(scenario: Scenario, vector: Vector, base: Vector) -> Vector:
    """The update that a participant sends: what its encoding stands for, see xain_wire.np.delta,
    element by element."""
    if not scenario.is_encoded:
        return vector
    decoded: list[np.float32] = []
    for first in range(0, len(vector), TILE_ELEMENTS):
        pairs = list(zip(vector, base, strict=True))[first : first + TILE_ELEMENTS]
        largest = max(abs(w - m) for w, m in pairs)
        if largest < 2.0**-120:
            decoded += [m for _, m in pairs]
        else:
            scale = np.float32(2.0 ** math.frexp(float(largest))[1])
            decoded += [m + np.float32(np.float16((w - m) / scale)) * scale for w, m in pairs]
    return np.array(decoded, np.float32)


def undisturbed(scenario: Scenario, first: str) -> Vector:
    """The last model of a session in which nothing goes wrong and all are in every round.

    first: the participant that makes the initial weights, if it is one that does.
    """
    names = [participant_name(index) for index in range(scenario.num_participants)]
    epoch_base = 0
    model: Vector | None = None
    if scenario.initial == "workload":
        model = initial_model(scenario)
    elif scenario.initial == "first":
        model = first_weights(scenario, first)
    aggregation = _aggregation_of(scenario.rules())
    own: dict[str, Vector] = {}
    num_initial, last = int(scenario.initial == "first"), ends_at(scenario)
    last = num_initial + scenario.rounds if last < 0 else last
    for number in range(num_initial, last):
        if model is None:
            rows = [first_weights(scenario, name) for name in names]
            model = aggregation.next_model(None, rows, [1.0] * len(rows))
            continue
        samples = [float(num_samples_of(name)) for name in names]
        if scenario.has_control:
            both = [corrected_weights(scenario, model, name, own.get(name)) for name in names]
            own = {name: variate for name, (_, variate) in zip(names, both, strict=True)}
            model = aggregation.next_model(model, [row for row, _ in both], samples, share=1.0)
            continue
        trained = [
            trained_weights(model, name, epochs_of(scenario, number, name), epoch_base)
            for name in names
        ]
        rows = [sent(scenario, vector, model) for vector in trained]
        model = aggregation.next_model(model, rows, samples)
        epoch_base += epochs_of(scenario, number)
    assert model is not None
    return model


def initial_model(scenario: Scenario) -> Vector:
    values = np.linspace(-1.0, 1.0, scenario.num_floats)
    return np.array([*values, *_no_control(scenario)]).astype(scenario.dtype)


def _combined(
    rules: Rules,
    aggregation: Aggregation,
    base: GlobalModel,
    updates: list[tuple[Update, int]],
    total: int,
    stored: Callable[[str], bytes | None],
    share: float | None,
) -> Vector:
    """The model of a round, from what was accepted in it. total: samples of all that train.
    share: as in Aggregation.next_model()."""
    updates = sorted(updates, key=lambda pair: pair[0].participant_id)
    rows = []
    for update, _ in updates:
        data = stored(update.weights.ref.key)
        assert data is not None, f"{update.weights.ref.key} is gone"
        rows.append(_vector(data))
    if base.is_empty and rules.initial == "first":
        assert len(rows) == 1, "one participant makes the initial weights"
        return rows[0]
    if base.is_empty:
        return aggregation.next_model(None, rows, [1.0] * len(rows))
    weights = [float(update.num_samples) for update, _ in updates]
    lost = 0.0
    if rules.carries_over and total:
        whole = float(max(total, sum(weights)))
        weights = [w * (1 + tau) for w, (_, tau) in zip(weights, updates, strict=True)]
        lost = max(0.0, whole - sum(weights))
    before = stored(base.ref.key)
    assert before is not None, f"{base.ref.key} is not durable"
    return aggregation.next_model(_vector(before), rows, weights, lost, share)


def _aggregation_of(rules: Rules) -> Aggregation:
    return Aggregation(
        rules.aggregation, rules.aggregation_options, rules.optimizer, rules.optimizer_options
    )


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def _npy(vector: Vector) -> bytes:
    return bytes(npy_header(vector.dtype, vector.shape)) + vector.tobytes()


def _vector(data: bytes) -> Vector:
    return np.load(io.BytesIO(data), allow_pickle=False)
