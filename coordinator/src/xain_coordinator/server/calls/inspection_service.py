"""The Inspection service: answers operators' questions from the durable session, and changes
nothing."""

import asyncio
import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from importlib.metadata import version
from itertools import islice
from typing import Any

import grpc
import numpy as np

from xain_coordinator.config.rule_keys import settings_of
from xain_coordinator.core.machine.decider import due_of_round
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.membership import Heard
from xain_coordinator.core.view.accounts import Account
from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.records import MAX_NAMES_OF_A_ROUND
from xain_coordinator.core.view.view import (
    conflict,
    not_eligible_because,
    planned,
    trend,
    waiting_for,
    warnings,
)
from xain_coordinator.core.vocabulary.errors import Reason, Refusal, invalid_request
from xain_coordinator.core.vocabulary.values import GlobalModel, ParticipantState, Phase, Task
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import MetricsStore
from xain_coordinator.server.calls.round_messages import MAX_BYTES, keep_own, round_messages
from xain_coordinator.server.calls.translate import (
    central_message,
    importance_message,
    model_message,
    tallies_message,
    threshold_message,
    transfer_message,
    wire_state,
)
from xain_coordinator.server.guard import Guard
from xain_coordinator.server.identity import certified_site
from xain_coordinator.server.predictions import RemotePredictor
from xain_foundation.settings.fields import parse_json
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.fl import inspection_pb2_grpc as inspection_grpc
from xain_workloads.errors import DataError

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

MAX_PAGE = 1000  # participants; the time of the event loop that an answer takes


class InspectionService(inspection_grpc.InspectionServicer):
    """counters: kept by the interceptor and others, shown as they are.

    trouble: what holds up the work under way; empty if nothing does.
    num_waiting: participants that wait for a slot of the session at this session time.
    predictions: asks the participants; None: none are asked.
    parameters: the status of the parameter server in this process as JSON; empty without one.
    health_socket: where the socket of health checks is; empty: beside the journal.
    description: of the data of all participants as JSON, in a thread; empty: there is none yet.
    study: the table of the study that the session belongs to as JSON, in a thread; empty: none.
    guard: of this process. in_the_clear: what leaves this machine without encryption, in words.

    A participant with a certificate is told of itself, and of what all have together.
    """

    def __init__(
        self,
        driver: Driver,
        metrics: MetricsStore,
        counters: Counter[str],
        trouble: Callable[[], str] = lambda: "",
        num_waiting: Callable[[float], int] = lambda now: 0,
        predictions: RemotePredictor | None = None,
        parameters: Callable[[], str] = str,
        health_socket: Callable[[], str] = str,
        description: Callable[[], str] = str,
        study: Callable[[], str] = str,
        guard: Guard | None = None,
        in_the_clear: Sequence[str] = (),
    ) -> None:
        self._guard = Guard() if guard is None else guard
        self._in_the_clear = in_the_clear
        self._description, self._study = description, study
        self._parameters, self._health_socket = parameters, health_socket
        self._predictions = predictions
        self._driver = driver
        self._metrics = metrics
        self._counters = counters
        self._trouble = trouble
        self._num_waiting = num_waiting

    async def GetStatus(
        self, request: inspection.GetStatusRequest, context: Context
    ) -> inspection.GetStatusResponse:
        """Tell how the session stands; a participant with a certificate is told only of itself and
        of all together."""
        session = self._driver.session
        round_ = session.open_round
        now = self._driver.clock.now()
        deadline = due_of_round(session, self._driver.strategy)
        ends_at = session.gives_up_at
        best, winner, rules = session.evaluation.best, session.evaluation.winner, session.rules
        is_evaluating = round_ is not None and round_.task is Task.EVALUATE
        access, site = self._guard.access, certified_site()
        goes_on = session.phase is Phase.FINISHED and self._driver.goes_on()
        answer = inspection.GetStatusResponse(
            session_id=session.session_id,
            state=wire_state(Phase.STANDBY if goes_on else session.phase),
            phase="evaluating" if is_evaluating else session.phase.value,
            best_round=winner.round if winner else None,
            best_value=winner.value if winner else None,
            no_better=session.evaluation.no_better,
            metric=best.metric if best else rules.evaluate_metric,
            metric_is_minimised=best.is_minimised if best else rules.evaluate_minimised,
            ended_because=session.evaluation.ended_because,
            round=session.round,
            num_rounds=session.rules.rounds,
            num_trained=session.num_trained,
            num_passes=session.rules.passes,
            plan=planned(session),
            num_connected=self._num_connected(now),
            num_required=session.rules.num_required,
            num_waiting=self._num_waiting(now),
            max_participants=session.rules.max_participants,
            num_selected=len(round_.selected) if round_ else 0,
            num_updates=len(round_.answers) if round_ else 0,
            cause=session.cause,
            waiting_for=waiting_for(
                session, self._trouble(), self._driver.strategy, self._driver.history
            ),
            session_seconds=session.since if session.phase is Phase.FINISHED else now,
            version=version("xain-coordinator"),
            deadline_seconds=None if deadline is None else deadline - now,
            ends_seconds=None if ends_at is None else ends_at - now,
            began_with="" if session.lineage is None else session.lineage.source,
            rounds_before=0 if session.lineage is None else session.lineage.num_rounds,
            counters={
                **self._counters,
                "late_updates": self._driver.num_late,
                "lost_metrics": self._metrics.num_lost,
            },
            warnings=[*warnings(session, self._driver.history), *self._guard.warnings],
            in_the_clear=self._in_the_clear,
            audit_lines=0 if access is None else access.num_lines,
            audit_hash="" if access is None else access.last_hash,
            trend=trend(session, self._driver.history),
            weighs_classes=rules.weighs_classes,
            not_admitted=session.members.not_admitted,
            sites=_accounts(self._driver.history),
            parameters=self._parameters(),
            health_socket=self._health_socket(),
            findings=[
                inspection.DataFinding(
                    level=one.level,
                    check=one.check,
                    participant_id=one.site,
                    column=one.column,
                    text=one.text,
                    fix=one.fix,
                )
                for one in session.findings
            ],
            opened_unix_seconds=session.opened_unix_s,
            thresholds=[
                threshold_message(number, one, _second_class(session))
                for number, one in session.evaluation.thresholds(rules).items()
            ],
            study="" if rules.step is None else rules.step.shown,
            central=central_message(session.evaluation.central),
            importance=importance_message(session, self._driver.history, is_whole=request.whole),
            **(_whole(session) if request.whole else {}),
        )
        if site is not None:
            _keep_own_of_status(answer, site)
        return answer

    async def Describe(
        self, request: inspection.DescribeRequest, context: Context
    ) -> inspection.DescribeResponse:
        """Describe the data of all sites together."""
        return inspection.DescribeResponse(table=await asyncio.to_thread(self._description))

    async def DescribeStudy(
        self, request: inspection.DescribeStudyRequest, context: Context
    ) -> inspection.DescribeStudyResponse:
        """The table of a study, so far."""
        return inspection.DescribeStudyResponse(table=await asyncio.to_thread(self._study))

    async def AskPredictions(
        self, request: inspection.AskPredictionsRequest, context: Context
    ) -> inspection.AskPredictionsResponse:
        """Predict rows with estimators that stay at the participants."""
        if self._predictions is None:
            raise Refusal(Reason.NOT_FITTED, "no participant is asked for predictions")
        if request.rows.count("[") > self._predictions.max_rows + 1:  # parsing them takes long
            raise invalid_request(
                f"rows has more than {self._predictions.max_rows} lists; ask for fewer rows"
            )
        try:
            rows = parse_json(request.rows)
        except ValueError as error:
            raise invalid_request(f"rows is not JSON: {error}") from None
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise invalid_request("rows is no JSON list of lists")
        try:
            found = await self._predictions.ask(
                list(request.columns),
                rows,
                timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
                max_retries=request.max_retries if request.HasField("max_retries") else None,
            )
        except DataError as error:
            raise invalid_request(str(error)) from None
        shares = found.probabilities
        return inspection.AskPredictionsResponse(
            values=json.dumps(found.values.tolist()),
            classes=found.classes,
            probabilities=b"" if shares is None else np.ascontiguousarray(shares, "<f8").tobytes(),
            answered=found.answered,
            missing=found.missing,
        )

    def _num_connected(self, now: float) -> int:
        """Number of members that are connected."""
        session = self._driver.session
        if session.phase is not Phase.FINISHED:
            return len(session.members)
        return sum(self._is_connected(participant_id, now) for participant_id in session.members)

    def _is_connected(self, participant_id: str, now: float) -> bool:
        """Whether a member is connected: always, before the session has ended."""
        session = self._driver.session
        return session.phase is not Phase.FINISHED or session.members.is_connected_after_end(
            participant_id, session.rules.lease_s, now
        )

    async def ListParticipants(
        self, request: inspection.ListParticipantsRequest, context: Context
    ) -> inspection.ListParticipantsResponse:
        """List members by name, page by page; a participant with a certificate sees itself
        alone."""
        if request.page_size < 0:
            raise invalid_request(f"page_size is {request.page_size}: it must not be negative")
        try:
            # The name that the page before ended with; clients treat it as opaque.
            after = base64.b64decode(request.page_token, altchars=b"-_", validate=True).decode()
        except ValueError:
            raise invalid_request("page_token is not one that was given here") from None
        page_size = min(request.page_size or MAX_PAGE, MAX_PAGE)
        members, site = self._driver.session.members, certified_site()
        shown = (name for name in members if site is None or name == site)
        names = nsmallest(page_size + 1, (name for name in shown if name > after))
        answer: list[inspection.ParticipantStatus] = []
        room = MAX_BYTES
        # The time at which each participant's lease runs out.
        leases = dict(members.expiries(self._driver.session.rules.lease_s))
        for name in names[:page_size]:
            status = self._participant(name, leases[name])
            room -= status.ByteSize()
            if room < 0:
                break
            answer.append(status)
        last = "" if len(answer) == len(names) else answer[-1].participant_id
        return inspection.ListParticipantsResponse(
            participants=answer,
            next_page_token=base64.urlsafe_b64encode(last.encode()).decode(),
        )

    def _participant(self, participant_id: str, expires_at: float) -> inspection.ParticipantStatus:
        """Status of a member. expires_at: of its lease."""
        session = self._driver.session
        now = self._driver.clock.now()
        round_ = session.open_round
        member = session.members[participant_id]
        account = self._driver.history.accounts.by_name.get(participant_id, Account())
        sign = session.members.heard.get(participant_id, Heard(now))
        state, transfer = sign.state, sign.transfer
        if not self._is_connected(participant_id, now):
            expires_at, state = now, ParticipantState.FINISHED
        number = session.trained_by(participant_id)
        is_accepted = round_ is not None and participant_id in round_.answers
        if is_accepted or sign.round != number or session.phase is Phase.FINISHED:
            transfer = None  # it has ended since that heartbeat
        return inspection.ParticipantStatus(
            participant_id=participant_id,
            selected=round_ is not None and participant_id in round_.selected,
            update_accepted=is_accepted,
            lease_seconds=max(0.0, expires_at - now),
            reported_state=wire_state(state),
            profile=pb.DataProfile(
                num_samples=member.profile.num_samples,
                num_features=member.profile.num_features,
                classes=member.profile.classes,
                target=member.profile.target,
                task=member.profile.task,
            )
            if member.profile
            else None,
            rounds_contributed=account.num_counted,
            round=number,
            tags=member.tags,
            num_refused=session.selection.faults_of(participant_id).num_refused,
            left_out_until=session.selection.left_out_until(participant_id, session.round),
            not_eligible_because=not_eligible_because(session, participant_id),
            last_failure=account.failure,
            rounds_missed=account.missed,
            conflict=conflict(session, participant_id),
            transfer=transfer_message(transfer),
        )

    async def ListRounds(
        self, request: inspection.ListRoundsRequest, context: Context
    ) -> inspection.ListRoundsResponse:
        """List the latest rounds up to a limit, or with a page size all of them, page by page."""
        records = self._driver.history.rounds
        total = records[0].round + len(records) if records else 0
        if not request.page_size:
            latest = islice(reversed(records), _limit(request.limit))
            answer = [status for status, _ in round_messages(self._driver, latest)]
            return inspection.ListRoundsResponse(rounds=reversed(answer), total_size=total)
        after = _after(request)
        page: list[inspection.RoundStatus] = []
        later = islice((one for one in records if one.round > after), _page_size(request) + 1)
        for status, is_whole in round_messages(self._driver, later):
            if len(page) == _page_size(request) or (page and not is_whole):
                token = _token(page[-1].round)
                break
            page.append(status)
        else:
            token = ""
        return inspection.ListRoundsResponse(rounds=page, next_page_token=token, total_size=total)

    async def ListModels(
        self, request: inspection.ListModelsRequest, context: Context
    ) -> inspection.ListModelsResponse:
        """List the latest models up to a limit, or with a page size all of them, page by page."""
        models = self._driver.history.models.values()
        # On the first page only: a client puts pages together.
        removed = () if request.page_token else sorted(self._driver.history.removed)
        if request.page_size:
            after = _after(request)
            later = (one for one in models if one.round > after)
            answer, is_last = _that_fit(later, _page_size(request))
            token = "" if is_last else _token(answer[-1].round)
        else:
            answer, _ = _that_fit(islice(reversed(models), _limit(request.limit)), MAX_LIMIT)
            answer.reverse()
            token = ""
        return inspection.ListModelsResponse(
            models=answer, removed=removed, next_page_token=token, total_size=len(models)
        )


def _keep_own_of_status(answer: inspection.GetStatusResponse, site: str) -> None:
    """Drop from a status all that tells of the operator's matters or of other sites."""
    answer.ClearField("warnings")  # they and the next sentence name others
    answer.ClearField("waiting_for")
    answer.ClearField("parameters")
    answer.ClearField("health_socket")
    answer.ClearField("counters")
    answer.ClearField("audit_lines")
    answer.ClearField("audit_hash")
    own = [one for one in answer.sites if one.participant_id == site]
    del answer.sites[:]
    answer.sites.extend(own)
    findings = [one for one in answer.findings if one.participant_id in ("", site)]
    del answer.findings[:]
    answer.findings.extend(findings)
    keep_own(answer.not_admitted, site)
    if answer.HasField("importance"):
        keep_own(answer.importance.sites, site)
        for column in answer.importance.columns:
            keep_own(column.sites, site)


def _second_class(session: Session) -> str:
    """Name of the second class of the model; empty if its metadata do not tell."""
    try:
        classes = json.loads(session.model.metadata["classes"]) if session.model else []
        return str(classes[1])
    except (ValueError, LookupError, TypeError):
        return ""


def _whole(session: Session) -> dict[str, Any]:
    """Fields of a status that are sent only on request: settings, tallies of the best model."""
    number, tallies = session.evaluation.shown or (0, None)
    return {
        "settings": settings_of(session.rules),
        "measured": None if tallies is None else tallies_message(tallies),
        "measured_round": number,
    }


def _accounts(history: History) -> list[inspection.SiteAccount]:
    """Accounts of participants that were selected, those that counted least often first."""
    selected = ((n, one) for n, one in history.accounts.by_name.items() if one.num_selected)
    found = sorted(selected, key=lambda one: (one[1].num_counted, one[0]))
    return [
        inspection.SiteAccount(
            participant_id=name,
            rounds_selected=account.num_selected,
            rounds_contributed=account.num_counted,
            rounds_missed=account.missed,
            last_reason=account.reason,
            last_failure=account.failure,
            away=account.away,
        )
        for name, account in found[:MAX_NAMES_OF_A_ROUND]
    ]


def _that_fit(
    models: Iterable[GlobalModel], number: int
) -> tuple[list[inspection.ModelStatus], bool]:
    """The first models, at least one, that fit into an answer, and whether these are all. A layout
    names every tensor, so that models differ in size."""
    answer: list[inspection.ModelStatus] = []
    room = MAX_BYTES
    for model in models:
        status = model_message(model)
        room -= status.ByteSize()
        if answer and (room < 0 or len(answer) == number):
            return answer, False
        answer.append(status)
    return answer, True


Paged = inspection.ListRoundsRequest | inspection.ListModelsRequest


def _page_size(request: Paged) -> int:
    """Entries that a page may have, MAX_PAGE at most; 0 if the request is for no pages. Raises
    INVALID_REQUEST."""
    if request.page_size < 0:
        raise invalid_request(f"page_size is {request.page_size}: it must not be negative")
    return min(request.page_size, MAX_PAGE)


def _after(request: Paged) -> int:
    """The number that the page before ended with, -1 without one; clients treat its token as
    opaque. Raises INVALID_REQUEST."""
    if not request.page_token:
        return -1
    if re.fullmatch("[!-~][0-9]{1,10}", request.page_token) is None:
        raise invalid_request("page_token is not one that was given here")
    return int(request.page_token[1:])


def _token(last: int) -> str:
    """The page token that continues after this number."""
    return f"a{last}"


def _limit(asked: int) -> int:
    """Entries that a request without pages gets; DEFAULT_LIMIT where it names no number."""
    return min(asked, MAX_LIMIT) if asked > 0 else DEFAULT_LIMIT
