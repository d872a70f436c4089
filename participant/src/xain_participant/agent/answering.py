"""Answers to the coordinator's questions for predictions, in a thread beside the training.

The participant opens the stream, since it can reach the coordinator and not the other way round. A
stream that ends is opened again after a short pause.
"""

from contextlib import suppress
from queue import Empty, SimpleQueue
from random import Random

import numpy as np

from xain_foundation.logs.logger import get_logger
from xain_foundation.names import shortened
from xain_foundation.net.backoff import Backoff
from xain_participant.agent.protocol import jittered
from xain_participant.agent.runtime import Runtime
from xain_participant.sdk.participant import Participant
from xain_participant.wire.client import CoordinatorClient, Refused
from xain_wire.fl import coordinator_pb2 as pb

MIN_PAUSE_S = 0.2
MAX_PAUSE_S = 2.0
MAX_ERROR = 500  # characters


class Answering:
    """Opens the stream and answers, until close()."""

    def __init__(
        self,
        participant: Participant,
        client: CoordinatorClient,
        participant_id: str,
        runtime: Runtime,
    ) -> None:
        self._participant = participant
        self._client = client
        self._chance = Random()  # spreads the pauses
        self._log = get_logger(__name__).bind(participant=participant_id)
        self._hung_up: SimpleQueue[None] = runtime.queue()  # wakes the thread from its pause
        self._is_closed = False

    def run(self) -> None:
        """Answer questions until close(), in a thread of its own; a stream that broke off is opened
        again."""
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S, self._chance)

        def answer(question: pb.PredictionQuestion) -> pb.PredictionAnswer:
            backoff.reset()
            return self._answer(question)

        while not self._is_closed:
            retry_after_s = 0.0
            try:
                self._client.answer_questions(answer)
            except Refused as refused:
                self._log.debug("predictions_ended", reason=str(refused))
                retry_after_s = refused.retry_after_s
            pause_s = backoff.next_s()
            if retry_after_s:
                pause_s = jittered(self._chance, retry_after_s)
            with suppress(Empty):
                self._hung_up.get(timeout=pause_s)

    def close(self) -> None:
        """End the thread. The client must be closed as well."""
        self._is_closed = True
        self._hung_up.put(None)

    def _answer(self, question: pb.PredictionQuestion) -> pb.PredictionAnswer:
        """The answer to a question. Never raises: an error is an answer, too."""
        answer = pb.PredictionAnswer(number=question.number)
        try:
            features = np.frombuffer(question.features, "<f8").reshape(question.num_rows, -1)
            trainings = [(one.digest.hex(), one.weight) for one in question.estimators]
            votes = self._participant.votes(trainings, features)
            answer.votes = np.ascontiguousarray(votes.mean, "<f8").tobytes()
            answer.lost.extend(bytes.fromhex(digest) for digest in votes.lost)
        except Exception as error:  # whatever the estimators raise
            reason = shortened(" ".join(str(error).split()) or type(error).__name__, MAX_ERROR)
            self._log.warning("not_predicted", reason=reason)
            answer.error = reason
        else:
            self._log.info("predicted", num_rows=question.num_rows, num_lost=len(answer.lost))
        return answer
