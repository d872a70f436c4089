"""Assignments as messages: the work of a participant in a round, with a model that is small."""

import json
from collections.abc import Callable, Mapping

import xxhash

from xain_coordinator.core.machine.questions import AssignmentFor
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import GlobalModel
from xain_coordinator.driver.driver import Driver
from xain_coordinator.server.calls.script_messages import merged
from xain_coordinator.server.calls.translate import (
    layout_message,
    process_group_message,
    ref_message,
    wire_task,
)
from xain_coordinator.server.weights.downloads import Downloads
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.comparing.gains import Budget

EncodingFor = Callable[[GlobalModel], pb.Encoding.ValueType]


class Assignments:
    """The messages of assignments. The latest that are the same for all participants are kept: a
    fleet asks for them at once.

    encoding_for: encoding of the updates of a model.
    """

    def __init__(self, driver: Driver, downloads: Downloads, encoding_for: EncodingFor) -> None:
        self._driver = driver
        self._downloads = downloads
        self._encoding_for = encoding_for
        # With the metadata of the model, and without them.
        self._made: dict[bool, tuple[r.Assignment, pb.StartTrainingRoundResponse]] = {}
        self._digested: tuple[Mapping[str, str], bytes] = ({}, b"")  # metadata and their digest

    def forget(self) -> None:
        """Drop the messages that are kept, so that all are made anew."""
        self._made = {}

    async def message(
        self, participant_id: str, known_metadata: bytes
    ) -> pb.StartTrainingRoundResponse:
        """The assignment of a participant, from those that are kept or made now. known_metadata:
        digest of the metadata that the participant has; empty if it has none."""
        reply = await self._driver.ask(AssignmentFor(participant_id))
        if (work := self.made(reply, known_metadata)) is not None:
            return work
        assert isinstance(reply, r.Assignment)
        metadata_digest = self._metadata_digest(reply.model.metadata)
        is_known = known_metadata == metadata_digest != b""
        ref = reply.model.ref
        encoding = self._encoding_for(reply.model)
        data = await self._downloads.inline(ref)
        # An empty model travels inside, but what is made of it need not be small.
        offer = (
            None
            if data and not reply.model.is_empty
            else await self._downloads.offer(participant_id, reply.round, reply.model)
        )
        work = pb.StartTrainingRoundResponse(
            epochs=reply.epochs,
            epoch_base=reply.epoch_base,
            round=reply.round,
            model=ref_message(ref, data, offer.download_url if offer and not data else ""),
            layout=layout_message(reply.model.layout),
            metadata={} if is_known else dict(reply.model.metadata),
            metadata_digest=metadata_digest,
            update_accepted=reply.update_accepted,
            upload=pb.WeightsRef(key=offer.upload_key, url=offer.upload_url)
            if offer and encoding == pb.PLAIN  # a store does not decode
            else None,
            encoding=encoding,
            task=wire_task(reply.task),
            evaluate=reply.evaluate,
            train_config=merged(reply.train_config, *reply.script_config),
            process_group=process_group_message(reply.process_group),
            min_evaluation_rows=self._driver.session.rules.evaluate_min_rows
            if reply.evaluate
            else 0,
            local=_local_budget(reply.local),
            counted_round=None if reply.counted_round < 0 else reply.counted_round,
            importance_limit_s=reply.importance_limit_s,
            best=self._best(reply.best_round),
            best_round=reply.best_round,
        )
        if not self._downloads.has_offers or (data and not reply.model.is_empty):
            self._made[is_known] = (reply, work)  # it has no URL of one participant
        return work

    def made(self, reply: r.Reply, known_metadata: bytes) -> pb.StartTrainingRoundResponse | None:
        """The message of an assignment if an equal one was made for another participant; else
        None."""
        assert isinstance(reply, r.Assignment)
        metadata_digest = self._metadata_digest(reply.model.metadata)
        made = self._made.get(known_metadata == metadata_digest != b"")
        return made[1] if made is not None and made[0] == reply else None

    def _best(self, number: int) -> pb.WeightsRef | None:
        """Reference of the best model, of this number; None if there is none."""
        best = self._driver.history.models.get(model_key(number)) if number >= 0 else None
        return None if best is None else ref_message(best.ref)

    def _metadata_digest(self, metadata: Mapping[str, str]) -> bytes:
        """Digest by which participants name metadata; empty for none."""
        if not metadata:
            return b""
        if self._digested[0] is not metadata:  # all models of a session share theirs
            text = json.dumps(metadata, sort_keys=True)
            self._digested = (metadata, xxhash.xxh3_128_digest(text.encode()))
        return self._digested[1]


def _local_budget(budget: Budget | None) -> pb.LocalBudget | None:
    """The message of a local model's budget; None without one."""
    if budget is None:
        return None
    return pb.LocalBudget(
        passes=budget.passes, limit_s=budget.limit_s, preprocessing=budget.preprocessing
    )
