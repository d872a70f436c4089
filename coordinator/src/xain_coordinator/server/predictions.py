"""Predictions that are asked of the participants, whose fitted estimators stay there.

Each participant that can answer keeps a stream open, since it reaches the coordinator and not the
other way round. A question goes to all participants that the model names, and each one answers with
the mean of its estimators' votes. The streams and the questions are soft state: nothing of them is
in the journal.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from numpy.typing import NDArray

from xain_coordinator.config.fields import MAX_PREDICT_RETRIES, MAX_PREDICT_TIMEOUT_S
from xain_coordinator.core.vocabulary.errors import Reason, Refusal, Unavailable
from xain_coordinator.core.vocabulary.values import GlobalModel
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.integrity import read_vector
from xain_foundation.logs.logger import get_logger
from xain_foundation.names import printable, shortened
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.errors import DataError, InvalidContent

if TYPE_CHECKING:
    from xain_workloads.ensembles.held import Holding
    from xain_workloads.ensembles.stacking import Stack

log = get_logger(__name__)

MAX_FEATURES_BYTES = 64 << 20
# Rows of a question, and those of all questions on their way; a client takes messages of 4 MiB.
MIN_BATCH_BYTES, MAX_BATCH_BYTES, ALL_BATCHES_BYTES = 64 << 10, 1 << 20, 64 << 20
# Rows of a request, as JSON.
MAX_ROWS_BYTES = 1 << 20
# Questions that wait to be sent to one participant.
MAX_QUEUED = 16
MAX_REASON = 300  # characters
_TOLERANCE = 1e-6  # of shares that add up to 1
_SHUTTING_DOWN = "the coordinator is shutting down"


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Predictions of a model, or of the participants that have answered.

    values: (n,) class names, or float64 for regression.
    classes: in the order of the columns of probabilities; empty for regression.
    probabilities: (n, k) float64, with vote = "hard" the shares of the votes; None for regression.
    answered: participants, by name.
    missing: why a participant did not answer, by name; also for a participant that has answered
        and has lost a part of its estimators.
    """

    values: NDArray[Any]
    classes: tuple[str, ...] = ()
    probabilities: NDArray[np.float64] | None = None
    answered: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A prediction request: rows in batches, and the shape of an answer.

    num_outputs: its columns. are_shares: they add up to 1.
    """

    batches: Sequence[NDArray[np.float64]]
    num_outputs: int
    are_shares: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """mean: (n, k). weight: of all votes in it. lost: trainings whose estimators are lost."""

    mean: NDArray[np.float64]
    weight: int
    lost: int


class _Stream:
    """The open prediction stream of one participant."""

    def __init__(self) -> None:
        # None ends the stream.
        self.outgoing: asyncio.Queue[pb.PredictionQuestion | None] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[pb.PredictionAnswer]] = {}

    async def ask(self, question: pb.PredictionQuestion) -> pb.PredictionAnswer:
        """Send a question and wait for its answer. Raises ConnectionError if too many questions
        wait, or the stream ends before the answer."""
        if self.outgoing.qsize() >= MAX_QUEUED:
            raise ConnectionError("it does not take its questions")
        answer: asyncio.Future[pb.PredictionAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[question.number] = answer
        self.outgoing.put_nowait(question)
        try:
            return await answer
        finally:
            del self._waiting[question.number]

    def take(self, answer: pb.PredictionAnswer) -> None:
        """Deliver an answer to its question; drop a late answer."""
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def end(self, why: str) -> None:
        """End the stream, and all waits for its answers with ConnectionError. why: its text."""
        self.outgoing.put_nowait(None)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError(why))


class RemotePredictor:
    """Asks the participants for predictions, and combines their votes.

    timeout_s, max_retries: where a question does not say otherwise.
    """

    # Bounds of what is asked at a time.
    max_asked = 8
    max_rows = 100_000
    max_batch_bytes = MAX_BATCH_BYTES
    max_answers_bytes = 256 << 20  # votes of all participants, combined when all have come
    # A participant whose stream has broken off opens another one within this time.
    reconnect_s = 5.0

    def __init__(
        self, driver: Driver, store: WeightsStore, *, timeout_s: float, max_retries: int
    ) -> None:
        self._driver = driver
        self._store = store
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._streams: dict[str, _Stream] = {}
        self._opened_at = time.monotonic()
        self._lost_at: dict[str, float] = {}  # of streams that broke off lately
        self._arrived = asyncio.Event()  # replaced after each arrival
        self._numbers = count(1)
        self._num_asked = 0
        self._is_closed = False
        self._read: tuple[str, Stack] | None = None  # of the model with this digest

    # --- questions ---

    async def ask(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        *,
        timeout_s: float | None = None,
        max_retries: int | None = None,
        earlier: tuple[GlobalModel, WeightsStore] | None = None,
    ) -> Predictions:
        """Predict rows with the estimators of all participants that answer.

        columns: names, each once, in any order. rows: numbers, texts and None.
        timeout_s: for the answer of each participant to all rows, at each attempt.
        max_retries: times that a participant which does not answer is asked again.
        earlier: another model than the latest of the present session, and the store of its session.
        Raises DataError if the rows do not fit the model or a bound, NOT_FITTED if there is
        no model or it needs no participants, NOBODY_ANSWERED, TOO_MANY_CALLS, and StoreError.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        max_retries = self._max_retries if max_retries is None else max_retries
        if not 0 < timeout_s <= MAX_PREDICT_TIMEOUT_S:
            raise DataError(f"timeout_s is {timeout_s}; at most {MAX_PREDICT_TIMEOUT_S:g}, above 0")
        if not 0 <= max_retries <= MAX_PREDICT_RETRIES:
            raise DataError(f"max_retries is {max_retries}; it must be 0 to {MAX_PREDICT_RETRIES}")
        if self._num_asked >= self.max_asked:
            why = f"{self._num_asked} predictions are under way already"
            raise Refusal(Reason.TOO_MANY_CALLS, why, retry_after_s=1.0)
        if not rows:
            raise DataError("there are no rows to predict")
        if len(rows) > self.max_rows:
            raise DataError(f"{len(rows)} rows; at most {self.max_rows} are predicted at a time")
        self._num_asked += 1
        try:
            model, store = earlier or (self._driver.session.model, self._store)
            return await self._ask(model, store, columns, rows, timeout_s, max_retries)
        finally:
            self._num_asked -= 1

    async def _ask(
        self,
        model: GlobalModel | None,
        store: WeightsStore,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        timeout_s: float,
        max_retries: int,
    ) -> Predictions:
        """Predict rows for ask(), which has checked the arguments: ask all participants that hold
        estimators, and combine the answers."""
        if model is None or model.is_empty:
            raise Refusal(Reason.NOT_FITTED, "there is no model yet")
        stack = await self._stack_of(model, store)
        by_name = _by_participant(stack.holdings)
        if not by_name:
            raise Refusal(Reason.NOT_FITTED, "no participant has fitted an estimator yet")
        prepared = await asyncio.to_thread(_prepared, model.metadata, columns, rows)
        classes, features = prepared
        num_outputs = max(len(classes), 1)
        most_rows = self.max_answers_bytes // (8 * num_outputs * len(by_name))
        if len(features) > most_rows:
            raise DataError(
                f"{len(features)} rows; at most {most_rows} are predicted at a time, with "
                f"{num_outputs} outputs of each of {len(by_name)} participants; ask for fewer rows"
            )
        batches = _batches(features, num_outputs, len(by_name), self.max_batch_bytes)
        asked = _Asked(batches, num_outputs, bool(classes))
        names = sorted(by_name)
        answers = await asyncio.gather(
            *(self._answer_of(name, by_name[name], asked, timeout_s, max_retries) for name in names)
        )
        found: dict[str, _Answer] = {}
        missing: dict[str, str] = {}
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, str):
                missing[name] = printable(shortened(answer, MAX_REASON))
                continue
            found[name] = answer
            if answer.lost:
                missing[name] = (
                    f"it has lost the estimators of {answer.lost} of its {len(by_name[name])} "
                    "trainings; the others count"
                )
        log.info(
            "predicted",
            round=model.round,
            num_rows=len(rows),
            answered=list(found),
            missing=missing,
        )
        if not found:
            told = "; ".join(f"{name}: {why}" for name, why in missing.items())
            raise Refusal(Reason.NOBODY_ANSWERED, f"no participant answered: {told}")
        mean = await asyncio.to_thread(_mean, list(found.values()))
        from xain_workloads.ensembles.stacking import halfway

        mean = await asyncio.to_thread(halfway, mean, features, stack, model.metadata)
        if not classes:
            return Predictions(mean[:, 0], (), None, tuple(found), missing)
        values = np.array(classes, dtype=np.str_)[np.argmax(mean, axis=1)]
        return Predictions(values, classes, mean, tuple(found), missing)

    async def _stack_of(self, model: GlobalModel, store: WeightsStore) -> "Stack":
        """The estimators that a bagging model lists, read once per model. Raises NOT_FITTED if the
        model is no such list, and StoreError."""
        if self._read is None or self._read[0] != model.ref.digest:
            self._read = model.ref.digest, await asyncio.to_thread(_read, store, model)
        return self._read[1]

    async def _answer_of(
        self,
        name: str,
        holdings: "Sequence[Holding]",
        asked: _Asked,
        timeout_s: float,
        max_retries: int,
    ) -> _Answer | str:
        """Ask one participant; return its answer, or the reason why there is none."""
        why = ""
        for attempt in range(1 + max_retries):
            try:
                stream = await self._stream_of(name, timeout_s, is_first=attempt == 0)
                async with asyncio.timeout(timeout_s):
                    return await self._answer_on(stream, holdings, asked)
            except TimeoutError:
                why = f"no answer within {timeout_s:g} s"
            except ConnectionError as no_answer:
                why = str(no_answer)
            except InvalidContent as useless:
                return str(useless)
        return why if not max_retries else f"{why}, asked {1 + max_retries} times"

    async def _stream_of(self, name: str, timeout_s: float, *, is_first: bool) -> _Stream:
        """The newest stream of a participant, awaited for a while if the participant is
        reconnecting. Raises ConnectionError."""
        wait_s = self.reconnect_s
        if is_first:  # a participant that went away earlier is not waited for
            wait_s -= time.monotonic() - self._lost_at.get(name, self._opened_at)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(wait_s, timeout_s))):
                while name not in self._streams and not self._is_closed:
                    await self._arrived.wait()
        if self._is_closed:
            raise ConnectionError(_SHUTTING_DOWN)
        if name not in self._streams:
            raise ConnectionError("it is not connected")
        return self._streams[name]

    async def _answer_on(
        self, stream: _Stream, holdings: "Sequence[Holding]", asked: _Asked
    ) -> _Answer:
        """Ask a participant for all batches on its stream. Returns the mean of its estimators.
        Raises ConnectionError and InvalidContent."""
        estimators = [
            pb.KeptEstimators(digest=bytes.fromhex(one.digest), weight=one.rows) for one in holdings
        ]
        means: list[NDArray[np.float64]] = []
        lost: set[str] = set()
        for rows in asked.batches:
            question = pb.PredictionQuestion(
                number=next(self._numbers),
                features=np.ascontiguousarray(rows, "<f8").tobytes(),
                num_rows=len(rows),
                estimators=estimators,
            )
            answer = await stream.ask(question)
            if answer.error:
                raise InvalidContent(answer.error)
            means.append(_votes(answer, len(rows), asked))
            lost.update(digest.hex() for digest in answer.lost)
        kept = [one for one in holdings if one.digest not in lost]
        weight = sum(one.rows * one.estimators for one in kept)
        if not weight:
            raise InvalidContent("it has lost all of its estimators")
        return _Answer(np.concatenate(means), weight, len(holdings) - len(kept))

    # --- streams ---

    async def serve(
        self, participant_id: str, answers: AsyncIterator[pb.PredictionAnswer]
    ) -> AsyncGenerator[pb.PredictionQuestion]:
        """Yield questions to a participant until its stream ends; its answers go to the callers
        that wait.
        A newer stream of the participant ends this one.

        Raises Unavailable when the coordinator stops, and what the parser raises for an answer that
        is no message or too long.
        """
        if self._is_closed:
            raise Unavailable("the coordinator is shutting down; try again in a moment")
        stream = _Stream()
        reading = asyncio.create_task(_read_answers(stream, answers))
        before = self._streams.get(participant_id)
        self._streams[participant_id] = stream
        if before is not None:
            before.end("its stream was replaced by a newer one")
        self._arrived.set()
        self._arrived = asyncio.Event()
        try:
            while (question := await stream.outgoing.get()) is not None:
                yield question
            if reading.done() and (refusal := reading.result()) is not None:
                raise refusal
        finally:
            reading.cancel()
            if self._streams.get(participant_id) is stream:
                del self._streams[participant_id]
                self._note_lost(participant_id)
            stream.end("its connection broke off")

    def _note_lost(self, participant_id: str) -> None:
        """Note that the stream of a participant broke off now, and forget those of long ago."""
        now = time.monotonic()
        self._lost_at = {n: at for n, at in self._lost_at.items() if now - at < self.reconnect_s}
        self._lost_at[participant_id] = now

    def end(self) -> None:
        """End all streams: the server stops."""
        self._is_closed = True
        for stream in self._streams.values():
            stream.end(_SHUTTING_DOWN)
        self._arrived.set()


async def _read_answers(
    stream: _Stream, answers: AsyncIterator[pb.PredictionAnswer]
) -> Refusal | None:
    """Take the answers of a participant until its stream ends. Returns why an answer was refused,
    or None if the connection broke off."""
    try:
        async for answer in answers:
            stream.take(answer)
    except Refusal as error:  # the answer is too long, or no message
        return error.with_traceback(None)
    except Exception as error:  # the connection broke off
        if not isinstance(error, grpc.aio.AbortError | grpc.RpcError):
            log.debug("answers_ended", reason=shortened(str(error), MAX_REASON))
    finally:
        stream.end("its connection broke off")
    return None


def _by_participant(holdings: "Sequence[Holding]") -> "dict[str, list[Holding]]":
    """Estimators that participants hold, by participant."""
    by_name: dict[str, list[Holding]] = {}
    for one in holdings:
        by_name.setdefault(one.participant, []).append(one)
    return by_name


def _read(store: WeightsStore, model: GlobalModel) -> "Stack":
    """Read the list of estimators that a bagging model is. Blocks. Raises NOT_FITTED and
    StoreError."""
    from xain_workloads.ensembles.bagging_options import options_of_model
    from xain_workloads.ensembles.stacking import Stack

    if model.metadata.get("workload") != "bagging" or options_of_model(model.metadata).publish:
        raise Refusal(
            Reason.NOT_FITTED, "the model is published: export it, or predict with its values"
        )
    return Stack.parse(read_vector(store, model.ref).tobytes())


def _prepared(
    metadata: Mapping[str, str], columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """The classes of the model, and the rows as the model takes them, (n, p). Raises DataError."""
    from xain_workloads.ensembles.bagging_options import options_of_model
    from xain_workloads.supervised import classes_of
    from xain_workloads.tables.preprocessing import prepare
    from xain_workloads.tables.rows import table_of_rows

    options = options_of_model(metadata)
    classes = classes_of(options.task, metadata)
    features = prepare(metadata, table_of_rows(metadata, columns, rows)).features
    if not np.isfinite(features).all():
        raise DataError("the prepared rows are not all finite")
    if features.nbytes > MAX_FEATURES_BYTES:
        raise DataError(
            f"the rows take {features.nbytes} bytes when they are prepared, at most "
            f"{MAX_FEATURES_BYTES} are predicted at a time; ask for fewer rows"
        )
    return classes, features


def _batches(
    features: NDArray[np.float64], num_outputs: int, num_asked: int, max_bytes: int
) -> list[NDArray[np.float64]]:
    """Rows for a question each, such that neither question nor answer is large."""
    size = min(max_bytes, max(MIN_BATCH_BYTES, ALL_BATCHES_BYTES // num_asked))
    num_rows = max(1, size // (8 * max(features.shape[1], num_outputs)))
    return [features[at : at + num_rows] for at in range(0, len(features), num_rows)]


def _votes(answer: pb.PredictionAnswer, num_rows: int, asked: _Asked) -> NDArray[np.float64]:
    """The votes in an answer, (num_rows, k). Raises InvalidContent if they are none."""
    expected = 8 * num_rows * asked.num_outputs
    if len(answer.votes) != expected:
        raise InvalidContent(
            f"it answered with {len(answer.votes)} bytes, expected were {expected}"
        )
    votes = np.frombuffer(answer.votes, "<f8").reshape(num_rows, asked.num_outputs)
    if not np.isfinite(votes).all():
        raise InvalidContent("its answer has values that are not finite")
    if asked.are_shares:
        sums = votes.sum(axis=1)
        if (
            (sums < 1 - _TOLERANCE).any()
            or (votes < -_TOLERANCE).any()
            or (sums > 1 + _TOLERANCE).any()
        ):
            raise InvalidContent("its answer has shares of classes that do not add up to 1")
    return votes


def _mean(answers: Sequence[_Answer]) -> NDArray[np.float64]:
    """Mean of the votes over the participants, (n, k), weighted by rows and estimators, in their
    order."""
    total: NDArray[np.float64] = np.zeros_like(answers[0].mean)
    total_weight = sum(answer.weight for answer in answers)
    for answer in answers:  # shares of the weight, so that large finite values do not overflow
        total += answer.weight / total_weight * answer.mean
    return total
