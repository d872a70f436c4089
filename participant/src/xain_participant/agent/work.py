"""The work of a round: ask what to do, train, hand in. Runs in a thread of its own.

Which piece comes when, the protocol decides; here each is one call that ends in one event.
"""

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from xain_foundation.logs.logger import get_logger
from xain_foundation.spare import Spare
from xain_participant.keep.result import Result
from xain_participant.keep.state import StateDirectory
from xain_participant.sdk import events as e
from xain_participant.sdk.encoded import quantise
from xain_participant.sdk.failures import describe
from xain_participant.sdk.metrics import MAX_JSON_BYTES, to_json
from xain_participant.sdk.participant import (
    MIN_ROWS,
    Assignment,
    BodyFailed,
    GroupBroken,
    Participant,
    ProcessGroup,
    Task,
    call_init_weights,
    call_train_round,
    take_evaluation,
    take_metrics,
)
from xain_participant.sdk.values import Call
from xain_participant.wire.client import CoordinatorClient, Refused
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_wire.np import can_encode
from xain_workloads.comparing.gains import Budget
from xain_workloads.errors import WorkloadError
from xain_workloads.model import Kind, Layout, TensorSpec

# The coordinator's reasons when it finds no object, or another one, where a participant has put its
# update into the store.
_WRONG_OBJECT = (
    RefusalReason.Name(RefusalReason.UPLOAD_MISSING),
    RefusalReason.Name(RefusalReason.INVALID_UPDATE),
)


class Work:
    """A thread that does one piece of work at a time. Between two pieces, the owner may look at
    `result` and drop it.

    keeper: keeps the result, too, for as long as it is not dropped; begins with what it has.
    on_saving: told the round before its result is kept, which may take a while.
    tells_messages: whether the coordinator may know the text of any exception.
    spare: memory of updates; by default its own.
    """

    def __init__(
        self,
        participant: Participant,
        client: CoordinatorClient,
        participant_id: str,
        keeper: StateDirectory | None = None,
        on_saving: Callable[[int], None] = lambda round_: None,
        *,
        tells_messages: bool = False,
        spare: Spare | None = None,
    ) -> None:
        self._participant = participant
        self._client = client
        self._participant_id = participant_id
        self._log = get_logger(__name__).bind(participant=participant_id)
        self._assignment = pb.StartTrainingRoundResponse()
        # The result, if it lies in the store already.
        self._put: pb.WeightsRef | None = None
        # Digest of a model whose download had other bytes; reported to the coordinator.
        self.damaged_digest = b""
        self._has_warned = False  # of a round without a sample
        self._spare = spare or Spare(max_arrays=1)  # of updates that were quantised
        self._keeper = keeper
        self._on_saving = on_saving
        self._tells_messages = tells_messages
        self._is_abandoned = False
        self._broken = (-1, 0, "")  # round, attempt and reason of the latest that broke
        self.result = keeper.load() if keeper is not None else None
        # Session of the next result. Set by the owner before TRAIN.
        self.session_id = ""
        # News of the round after the one that was handed in last, until the owner has taken it.
        self.next_round: pb.WatchResponse | None = None
        # Whether the participant's own code runs, which cannot be interrupted.
        self.in_participant = False

    def do(self, call: Call, round_: int) -> e.Event:
        """Carry out BEGIN_ROUND, TRAIN, HAND_IN or REPORT. Returns an event, also for an error."""
        try:
            match call:
                case Call.BEGIN_ROUND:
                    return self._begin_round()
                case Call.TRAIN:
                    return self._train(round_)
                case Call.HAND_IN:
                    return self._hand_in(round_)
                case Call.REPORT:
                    return self._report(round_)
                case _:
                    raise AssertionError(f"{call} is not work")
        except Refused as refused:
            return refused.event(call)
        except GroupBroken as broken:
            self._log.warning(
                "group_broken", round=round_, attempt=self._attempt, reason=str(broken)
            )
            self._broken = round_, self._attempt, str(broken)
            return e.GroupBroken(round_)
        except BodyFailed as failed:
            error = failed.__cause__ or failed
            self._log.debug("script_failed", round=round_, reason=repr(error))
            return self._failed(round_, error, is_of_script=True)
        except WorkloadError as error:
            # Without a traceback: it names a setting or a column, as the last line of the log does.
            return self._failed(round_, error)
        except BaseException as error:  # of the participant's own code
            # Also a SystemExit of the participant: it ends this thread, and the loop must hear it.
            self._log.error("work_failed", round=round_, call=call.name.lower(), exc_info=error)
            return self._failed(round_, error)

    def _failed(
        self, round_: int, error: BaseException, *, is_of_script: bool = False
    ) -> e.TrainingFailed:
        """Describe an error as the event of a failed training. is_of_script: the body of a script's
        loop has raised it."""
        message = "".join(traceback.format_exception_only(error)).strip()
        failure = describe(error, tells_messages=self._tells_messages, is_of_script=is_of_script)
        return e.TrainingFailed(round_, message, failure)

    def assign(self, assignment: pb.StartTrainingRoundResponse) -> e.Event:
        """Take an assignment that came without being asked for. Not while a piece is being done."""
        self._assignment = assignment
        return e.Assigned(assignment.round, assignment.update_accepted, self._attempt)

    @property
    def _attempt(self) -> int:
        """Number of the attempt, if a process group trains the round; else 0."""
        return self._assignment.process_group.attempt

    @property
    def is_evaluation(self) -> bool:
        """Whether the assignment is to evaluate the last model, and not to train."""
        return self._assignment.task == pb.EVALUATE

    def drop(self, *, is_kept: bool = False) -> None:
        """Drop the result. Not to be called while a round is trained. is_kept: its copy on the disk
        stays."""
        self.result = None
        if self._keeper is not None and not is_kept:
            self._keeper.forget()

    def forget_assignment(self) -> None:
        """Let go of the model that came with the assignment, once its result is handed in."""
        self._assignment = pb.StartTrainingRoundResponse()

    def abandon(self) -> None:
        """Write no further result to disk, except one that is being written: the participant's own
        code may run on for long, and the next run may have written its result to the same folder by
        then."""
        self._is_abandoned = True

    def _begin_round(self) -> e.Event:
        """Ask for an assignment. Raises Refused."""
        return self.take(self._client.start_round(self.damaged_digest))

    def take(self, assignment: pb.StartTrainingRoundResponse) -> e.Event:
        """Take an assignment that was asked for, with the damaged digest, which is told by that."""
        self.damaged_digest = b""
        return self.assign(assignment)

    def _train(self, round_: int) -> e.Event:
        """Train, evaluate or make initial weights, as the assignment says; the result is kept here
        and on the disk. Raises what the participant's code raises, and Refused if the model cannot
        be had."""
        assignment = self._assignment
        self._put = None
        if (kept := self._kept(round_)) is not None:
            self.result = kept
            return e.Trained(round_, is_durable=True, is_training=kept.is_training)
        task = _TASKS.get(assignment.task)
        if task is None:
            raise RuntimeError(f"the coordinator asks for an unknown task, {assignment.task}")
        best = self._best(assignment)
        with self._calling_participant():
            self._participant.on_model(layout_of(assignment.layout), dict(assignment.metadata))
            self._participant.on_round(
                _assignment(assignment, self.session_id, task, self._participant_id, best)
            )
            needs_model = task != "train" or self._participant.needs_model
        weights = self._model(assignment) if needs_model else np.empty(0, np.uint8)
        base = self._base_for_encoding(weights)
        layout: Layout = ()
        with self._calling_participant():
            if task == "evaluate":
                self._participant.evaluate_round(weights)
                vector, num_samples = np.empty(0, weights.dtype), 0
            elif task == "initialise" or (needs_model and weights.size == 0):
                vector, layout = call_init_weights(self._participant, weights.dtype)
                num_samples = 0
            else:
                vector, num_samples = call_train_round(
                    self._participant, weights, assignment.epochs, assignment.epoch_base
                )
                if num_samples == 0 and not self._has_warned:
                    self._has_warned = True  # of the next rounds it would say the same
                    self._log.warning("trained_without_samples", round=round_)
                if self._attempt:
                    layout = self._participant.slice_layout()
            measured = take_metrics(self._participant)
            evaluation = take_evaluation(self._participant)
        if task == "evaluate" and evaluation is None:
            raise RuntimeError("evaluate_round() must call report_evaluation()")
        metrics_json, num_dropped = to_json(
            measured, participant_id=self._participant_id, round_=round_
        )
        if num_dropped:
            self._log.warning(
                "metrics_dropped", round=round_, num_points=num_dropped, limit_bytes=MAX_JSON_BYTES
            )
        encoded = None
        if base is not None:
            encoded = quantise(vector, base)
            if encoded is not None:
                vector = base  # the decoded values: every way up sends these
        self.result = Result(
            self.session_id,
            round_,
            vector,
            num_samples,
            metrics_json,
            {name: value for point in measured for name, value in point.values.items()},
            encoded,
            layout,
            evaluation,
            self._attempt,
        )
        return e.Trained(round_, self._keep(self.result), self.result.is_training)

    def _model(self, assignment: pb.StartTrainingRoundResponse) -> NDArray[Any]:
        """Download the global model, and note the digest of a damaged one. Raises Refused."""
        try:
            return self._client.get_weights(assignment.model)
        except Refused as refused:
            if refused.status is grpc.StatusCode.DATA_LOSS:
                self.damaged_digest = assignment.model.digest
            raise

    def _best(self, assignment: pb.StartTrainingRoundResponse) -> NDArray[Any] | None:
        """Download the best model, if it is to be measured with the last one. Without it the last
        one alone is."""
        if not assignment.HasField("best"):
            return None
        try:
            return self._client.get_weights(assignment.best)
        except Refused as refused:
            self._log.warning("no_best_model", round=assignment.round, reason=str(refused))
            return None

    def _report(self, round_: int) -> e.Event:
        """Report that a process group broke. Raises Refused."""
        broken, attempt, reason = self._broken
        assert broken == round_, f"the group of round {broken} broke, not that of {round_}"
        self._client.report_group_broken(round_, attempt, reason)
        return e.Reported(round_)

    def _base_for_encoding(self, weights: NDArray[Any]) -> NDArray[Any] | None:
        """A copy of the model, since training may change the array that it is given. None if the
        update stays plain, as a small one does, which travels inside its call."""
        is_encoded = self._assignment.encoding == pb.FLOAT16 and can_encode(weights, weights)
        if not is_encoded or weights.nbytes <= self._client.max_inline_bytes:
            return None
        return self._spare.copy(weights)

    def _kept(self, round_: int) -> Result | None:
        """Load a result of this round that was accepted, and is asked for again, from the disk."""
        if self._attempt:
            return None
        kept = self._keeper.load() if self._keeper is not None and self.session_id else None
        if kept is None or (kept.session_id, kept.round) != (self.session_id, round_):
            return None
        return kept

    def _keep(self, result: Result) -> bool:
        """Write the result to disk; returns whether it outlives this process."""
        # A session without a name cannot be recognised after a restart, and a slice has no use
        # after one: the round starts again.
        if result.attempt or self._keeper is None or not result.session_id or self._is_abandoned:
            return False
        self._on_saving(result.round)
        try:
            self._keeper.keep(result)
        except OSError as not_kept:
            self._log.warning("result_not_kept", round=result.round, reason=str(not_kept))
            return False
        return True

    def _hand_in(self, round_: int) -> e.Event:
        """Upload the result and end the round. Raises Refused."""
        request = self.end_request(round_)
        if request is None:
            return e.HandedIn(round_)
        try:
            self.next_round = self._client.end_round(request)
        except Refused as refused:
            self.on_hand_in_refused(refused)
            raise
        return e.HandedIn(round_)

    def end_request(self, round_: int) -> pb.EndTrainingRoundRequest | None:
        """Upload the result, unless it is small enough to travel within the request that is
        returned. Raises Refused.

        Returns None if the result was dropped while this waited: an advertisement said that it has
        arrived, or that the session is another one. Either way there is nothing left to send.
        """
        result = self.result
        if result is None:
            return None
        assert result.round == round_, f"a result of round {result.round}, not {round_}"
        offer = self._offer(round_)
        # Through the coordinator each attempt uploads anew what is not there, since one that came
        # back may have lost what was not acknowledged. One that has this very update answers at
        # once, without the bytes. What was put into the store stays there, whatever becomes of the
        # coordinator.
        update = self._put
        if update is None and not result.is_evaluation:
            update = self._client.put_weights(round_, result.vector, offer, result.encoded)
        is_put = offer is not None and update is not None and update.key == offer.key
        self._put = update if is_put else None
        return self._client.end_request(
            round_,
            update,
            result.num_samples,
            result.metrics_json,
            result.layout,
            result.evaluation,
            result.attempt,
        )

    def on_hand_in_refused(self, refused: Refused) -> None:
        """Note that the coordinator has refused the request of end_request()."""
        offer = self._offer(self._assignment.round)
        if offer is not None and self._put is not None and refused.reason in _WRONG_OBJECT:
            self._put = None
            self._client.on_offer_refused(offer)

    def _offer(self, round_: int) -> pb.WeightsRef | None:
        """Object of the store to which the update of this round is put; None if there is none."""
        assignment = self._assignment
        if assignment.round != round_ or not assignment.upload.url:
            return None
        return assignment.upload

    @contextmanager
    def _calling_participant(self) -> Iterator[None]:
        """Mark the block as the participant's own code, which cannot be interrupted."""
        self.in_participant = True
        try:
            yield
        finally:
            self.in_participant = False


_TASKS: Mapping[int, Task] = {
    pb.TRAIN: "train",
    pb.EVALUATE: "evaluate",
    pb.INITIALISE: "initialise",
}


_KINDS: Mapping[str, Kind] = {"statistic": "statistic", "control": "control"}


def layout_of(tensors: Iterable[pb.Tensor]) -> Layout:
    """Convert the tensors that the coordinator lists to a layout."""
    return tuple(
        TensorSpec(t.name, tuple(t.shape), t.dtype, _KINDS.get(t.kind, "weight")) for t in tensors
    )


def _assignment(
    assignment: pb.StartTrainingRoundResponse,
    session_id: str,
    task: Task,
    participant_id: str,
    best: NDArray[Any] | None,
) -> Assignment:
    """Convert the coordinator's assignment to the one that the participant's code gets."""
    return Assignment(
        session_id=session_id,
        round=assignment.round,
        task=task,
        epochs=assignment.epochs,
        epoch_base=assignment.epoch_base,
        evaluate=assignment.evaluate,
        config=json.loads(assignment.train_config or "{}"),
        participant_id=participant_id,
        process_group=_process_group(assignment),
        min_rows=max(MIN_ROWS, assignment.min_evaluation_rows),
        local=_budget(assignment),
        importance_limit_s=assignment.importance_limit_s,
        best=best,
        counted_round=assignment.counted_round if assignment.HasField("counted_round") else -1,
        best_round=assignment.best_round if assignment.HasField("best") else -1,
    )


def _budget(assignment: pb.StartTrainingRoundResponse) -> Budget | None:
    """The budget of a local model; None without one."""
    if not assignment.HasField("local"):
        return None
    budget = assignment.local
    return Budget(budget.passes, budget.limit_s, budget.preprocessing)


def _process_group(assignment: pb.StartTrainingRoundResponse) -> ProcessGroup | None:
    """The process group that trains the round; None without one."""
    if not assignment.HasField("process_group"):
        return None
    group = assignment.process_group
    return ProcessGroup(group.attempt, group.rank, group.world_size, group.address)
