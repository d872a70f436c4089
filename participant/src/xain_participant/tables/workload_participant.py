"""A participant that needs no code: it trains whatever workload the coordinator declares."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from xain_foundation.logs.logger import get_logger
from xain_foundation.settings.hints import hint
from xain_participant.keep.variates import KeptVariates
from xain_participant.sdk.estimators import KeptEstimators, Votes
from xain_participant.sdk.participant import Assignment, Participant
from xain_participant.stages.stage_trainer import StageTrainer
from xain_participant.tables.personal import PersonalTensors
from xain_workloads.class_weights import KEY as CLASS_WEIGHTS_KEY
from xain_workloads.comparing.gains import LocalModel, gain_of
from xain_workloads.comparing.importance import Importance
from xain_workloads.comparing.local import train_local
from xain_workloads.comparing.permuting import importances_of, permuted_by
from xain_workloads.errors import DataError, Diverged, WorkloadError
from xain_workloads.linear.row_losses import row_losses
from xain_workloads.measures.figures import figures
from xain_workloads.measures.tallies import Tallies
from xain_workloads.model import CONTROL_LOST, Layout, Model, control_size, personal_patterns
from xain_workloads.scaffold import without_control
from xain_workloads.supervised import cause_of_divergence
from xain_workloads.tables.checks.unlike_model import unlike_columns
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.division import Division
from xain_workloads.tables.preprocessing import KEY, at_site, prepare
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.statistics import MIN_CATEGORY_COUNT, MIN_KNOWN
from xain_workloads.tables.table import Table
from xain_workloads.workload import TrainResult, Workload, from_metadata

log = get_logger(__name__)

Divide = Callable[[Division | None], tuple[Table | Dataset, Table | Dataset]]
MAX_NAMED = 10  # columns in a line of the log


class WorkloadParticipant(Participant):
    """Trains on one local table. It reports what the workload measures, and "samples" and
    "seconds" of its training.

    data: the rows to train on; a Dataset is taken as a table of number columns. They are prepared
        as the model says, by the preprocessing that the coordinator fits from the statistics in
        all profiles.
    seed: of the shuffles, 0 or more. The same seed, data and model give the same update; with the
        workload "bagging" the participant's name counts, too.
    test: rows that are not trained on. If there are any, the global models that the coordinator
        wants evaluated are measured on them; what is measured is also sent as metrics whose names
        begin with "test_".
    min_category_count, min_known: what travels of the data, as statistics.describe() takes them.
    stages: trains a stage of a network in a process group, as the coordinator asks for it.
    divide: answers rows to train on, and rows to test on, for a session of a study; None: the
        participant takes part in no study that divides its rows.
    personal: keeps the tensors that do not travel; None keeps them in memory.
    estimators: keeps the fitted estimators that do not travel; None keeps them in memory.
    variates: keeps the control variates of SCAFFOLD; None keeps them in memory.
    Raises DataError if two features of a Dataset have the same name.
    """

    def __init__(
        self,
        data: Table | Dataset,
        seed: int = 0,
        test: Table | Dataset | None = None,
        *,
        min_category_count: int = MIN_CATEGORY_COUNT,
        min_known: int = MIN_KNOWN,
        personal: PersonalTensors | None = None,
        estimators: KeptEstimators | None = None,
        variates: KeptVariates | None = None,
        stages: StageTrainer | None = None,
        divide: Divide | None = None,
    ) -> None:
        self._divide = divide
        self._data = _as_table(data)
        self._personal = personal or PersonalTensors()
        self._estimators = estimators or KeptEstimators()
        self._variates = variates or KeptVariates()
        self._seed = seed
        self._test = None if test is None else _as_table(test)
        self._told = min_category_count, min_known
        self._profile: DataProfile | None = None  # of a large table it takes seconds
        self._prepared: tuple[str | None, Dataset, Dataset | None] | None = None
        self._workload: Workload | None = None
        self._layout: Layout = ()
        self._metadata: Mapping[str, str] = {}
        self._stages = stages or StageTrainer()
        self._assignment, self._assigned_at = Assignment("", -1), 0.0
        self._slice: Layout = ()  # of the latest stage
        self._has_warned = False  # of categories with few rows
        self._is_evaluated = False  # whether the round's model is to be measured first

    def profile(self) -> DataProfile:
        """Sizes, columns, classes and statistics of the data."""
        if self._profile is None:
            self._profile = self._data.profile(*self._told)
        return self._profile

    @property
    def can_divide(self) -> bool:
        return self._divide is not None

    def divide(self, division: Division | None) -> None:
        """Divide the rows as a session of a study asks for, and drop profile and preparation."""
        assert self._divide is not None, "only one that can divide is asked"
        train, test = self._divide(division)
        self._data, self._test = _as_table(train), _as_table(test)
        self._profile = self._prepared = None

    def on_model(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        """Make the workload that the metadata name, unless it is that of the round before. Raises
        ValueError if they name a workload or options that we do not know."""
        self._layout = layout
        self._personal.on_model(layout, metadata)
        if metadata == self._metadata:
            return  # as in the round before
        self._workload = from_metadata(metadata) if "workload" in metadata else None
        self._metadata = metadata

    def on_round(self, assignment: Assignment) -> None:
        """Note the assignment, also for the personal tensors and the control variates."""
        self._assignment, self._assigned_at = assignment, time.monotonic()
        self._is_evaluated = assignment.evaluate
        self._personal.on_round(assignment)
        self._variates.on_round(assignment)

    @property
    def process_group_address(self) -> str:
        return self._stages.address

    def slice_layout(self) -> Layout:
        return self._slice

    def end_attempt(self, round_: int = -1, attempt: int = 0) -> None:
        self._stages.end(round_, attempt)

    @property
    def can_evaluate(self) -> bool:
        """Whether rows were set aside."""
        return self._test is not None and self._test.num_samples > 0

    def evaluate_round(self, weights: NDArray[Any]) -> None:
        """Measure the global model on the rows that were set aside. Raises as train_round()."""
        if self._workload is None:
            raise WorkloadError(_NO_WORKLOAD)
        model = Model(self._personal.with_own(weights), self._layout, self._metadata)
        _, test = self._datasets()
        assert test is not None, "only one that can evaluate is asked"
        if test.num_samples < self._assignment.min_rows:
            self.withhold_evaluation()
            return
        measured = self._workload.measure(model, test)
        self.update_metrics(**{f"test_{name}": value for name, value in measured.metrics.items()})
        compared = self._compared(model)
        local = self._local_model(self._workload, compared, test, measured.tallies)
        importances = self._importances(self._workload, compared, test, measured.tallies)
        self.report_evaluation(
            measured.metrics, test.num_samples, measured.tallies, local, importances
        )

    def _compared(self, model: Model) -> dict[int, Model]:
        """The last model, and the best one before it if there is one, by their numbers."""
        assigned = self._assignment
        models = {assigned.round: model}
        # Tensors of the best model that stay here are not kept.
        if assigned.best is not None and not personal_patterns(self._metadata):
            models[assigned.best_round] = replace(model, vector=assigned.best)
        return models

    def _importances(
        self, workload: Workload, models: Mapping[int, Model], test: Dataset, of_all: Tallies | None
    ) -> tuple[Importance, ...]:
        """Importances of the columns of these models on held-out rows, test, if the coordinator
        wants them. of_all: tallies of these rows; None if they are too large to be added."""
        assigned, began = self._assignment, time.monotonic()
        if not assigned.importance_limit_s or of_all is None:
            return ()
        seed = f"{assigned.participant_id}/{self._seed}"
        try:
            found = importances_of(
                workload, models, test, assigned.importance_limit_s, permuted_by(seed)
            )
        except (DataError, ValueError) as error:
            log.warning("importance_failed", round=assigned.round, reason=str(error))
            return ()
        if found:
            log.info(
                "importance",
                round=assigned.round,
                participant=assigned.participant_id,
                columns=len(found[0].columns),
                repeats=found[0].repeats,
                seconds=round(time.monotonic() - began, 3),
            )
        return found

    def _local_model(
        self,
        workload: Workload,
        models: Mapping[int, Model],
        test: Dataset,
        of_all: Tallies | None,
    ) -> LocalModel | None:
        """The local model of this site, if the coordinator wants one: see train_local().

        models: global ones that it is compared with. of_all: tallies of the last one on the
        held-out rows, test; None if they are too large to be added.
        """
        assigned = self._assignment
        budget = assigned.local
        if budget is None or of_all is None:
            return None
        assert self._test is not None, "only one that can evaluate is asked"
        losses = {number: row_losses(workload, one, test) for number, one in models.items()}
        seed, began = self._seed_of_workload(), time.monotonic()
        local, _ = train_local(
            self._metadata,
            self.profile(),
            self._data,
            self._test,
            budget,
            seed,
            losses,
            began=self._assigned_at,  # the coordinator's deadline goes on meanwhile
        )
        fields = {
            "round": assigned.round,
            "participant": assigned.participant_id,
            "passes": local.passes,
            "seconds": round(time.monotonic() - began, 3),
        }
        if local.tallies is None:
            log.info("no_local_model", **fields, reason=local.why_not)
            return local
        told = replace(local, figures=figures(local.tallies), num_samples=test.num_samples)
        weighs = CLASS_WEIGHTS_KEY in self._metadata
        gain = gain_of(figures(of_all), told, assigned.round, weighs_classes=weighs)
        if gain is not None:
            tell = log.warning if gain.is_loss else log.info
            tell("local_model", **fields, message=gain.sentence)
        return local

    @property
    def needs_model(self) -> bool:
        """Whether the workload trains from the model, or measures it before."""
        trains_from_it = getattr(self._workload, "needs_model", True)
        return trains_from_it or (self._is_evaluated and self.can_evaluate)

    @property
    def can_predict(self) -> bool:
        """Whether fitted estimators stay here."""
        return not self._estimators.is_empty

    def votes(self, trainings: Sequence[tuple[str, int]], features: NDArray[Any]) -> Votes:
        """Vote for rows with the estimators that stay here, as KeptEstimators.votes() does."""
        return self._estimators.votes(trainings, features)

    def init_weights(self) -> NDArray[Any]:
        """Refuse: a workload's initial model depends on the data of all, so only the coordinator
        can make it. Raises WorkloadError always."""
        raise WorkloadError(_NO_WORKLOAD)

    def train_round(
        self, weights: NDArray[Any], epochs: int, epoch_base: int
    ) -> tuple[NDArray[Any], int]:
        """Train the workload from the global model, and measure that first if the coordinator asks
        for it. With 0 epochs it only measures; in a process group it trains a stage, and returns
        its slice. The metrics go to update_metrics().

        Raises WorkloadError if the coordinator declares none, and what its train() raises if
        data and model do not fit.
        """
        if self._workload is None:
            raise WorkloadError(_NO_WORKLOAD)
        model = Model(self._personal.with_own(weights), self._layout, self._metadata)
        if self._is_evaluated and self.can_evaluate:
            self.evaluate_round(weights)
        data, _ = self._datasets()
        if epochs == 0:  # a round that only measures
            measured = self._workload.measure(model, data).metrics
            if control_size(model.layout):
                self._variates.keep(self._variates.begin(model).own)
            self.update_metrics(**measured, **self._lost_control)
            return weights, data.num_samples
        started_at = time.monotonic()
        if self._assignment.process_group is not None:
            stage = self._stages.train(
                self._assignment, model, data, epochs=epochs, epoch_base=epoch_base
            )
            self._slice = stage.layout
            seconds = time.monotonic() - started_at
            self.update_metrics(
                **{**stage.metrics, "samples": stage.num_samples, "seconds": seconds}
            )
            return stage.vector, stage.num_samples
        seed = self._seed_of_workload()
        self._require_rows(model, data)
        try:
            result = self._train(
                self._workload, model, data, epochs=epochs, epoch_base=epoch_base, seed=seed
            )
        except Diverged as error:
            cause = cause_of_divergence(self._metadata, data)
            raise Diverged(f"{error}; {cause}" if cause else str(error)) from error
        seconds = time.monotonic() - started_at
        measured = {**result.metrics, "samples": result.num_samples, "seconds": seconds}
        self.update_metrics(**measured, **self._lost_control)
        if result.kept:
            assigned = self._assignment
            self._estimators.keep(assigned.session_id, assigned.round, self._metadata, result.kept)
        return self._personal.keep_own(result.vector, weights), result.num_samples

    @property
    def _lost_control(self) -> dict[str, float]:
        """The metric of a round that had to begin without the own variate of the participant."""
        return {CONTROL_LOST: 1.0} if self._variates.is_lost else {}

    def _train(self, workload: Any, model: Model, data: Dataset, **arguments: int) -> TrainResult:
        """Train, and keep the participant's own control variate if the model has the server's."""
        if not control_size(model.layout):
            trained: TrainResult = workload.train(model, data, **arguments)
            return trained
        variates, inner = self._variates.begin(model), without_control(model)
        trained = workload.train(inner, data, correction=variates.correction, **arguments)
        vector, own = variates.after(inner, trained.vector, trained.path)
        self._variates.keep(own)
        return replace(trained, vector=vector)

    def _require_rows(self, model: Model, data: Dataset) -> None:
        """Log categories of whose few rows sums would tell. Raises DataError if those of all rows
        would."""
        few_rows = getattr(self._workload, "few_rows", None)
        if few_rows is None:
            return
        if (found := few_rows(model, data, self._told[1])) and not self._has_warned:
            log.warning(
                "few_rows",
                columns=", ".join(found[:MAX_NAMED]),
                num=len(found),
                hint="the sums that are sent tell of the few rows with these categories: join them"
                " with others, or leave the columns out",
            )
        self._has_warned = True

    def _seed_of_workload(self) -> int:
        """The seed of the training; for bagging another one for each participant."""
        if self._workload is not None and self._workload.name == "bagging":
            from xain_workloads.ensembles.bagging import seed_of

            return seed_of(self._seed, self._assignment.participant_id)
        return self._seed

    def _datasets(self) -> tuple[Dataset, Dataset | None]:
        """The rows to train on, and those to test on if there are any, as the model takes them.
        They are prepared once for all rounds of a session."""
        text = self._metadata.get(KEY)
        if self._prepared is None or self._prepared[0] != text:
            metadata = at_site(self._metadata, self._data)
            test = None
            if self._test is not None and self._test.num_samples > 0:
                test = prepare(metadata, self._test, fill_absent=True)
            # The coordinator has compared the columns with the schema, so absent ones are allowed.
            data = prepare(metadata, self._data, fill_absent=True, to_train=True)
            if (left_out := self._data.num_samples - data.num_samples) > 0:
                log.warning(
                    "targets_far_outside",
                    rows=left_out,
                    of=self._data.num_samples,
                    hint="these rows are not trained on, as their target is far from all others: "
                    "correct them, or let them count: "
                    + hint("xain-coordinator", "workload.preprocessing.clip = 0"),
                )
            for message in unlike_columns(self._metadata, self._data):
                log.warning("unlike_the_model", message=message)
            self._prepared = text, data, test
        return self._prepared[1:]


def _as_table(data: Table | Dataset) -> Table:
    """The same rows as a table."""
    return data if isinstance(data, Table) else Table.from_dataset(data)


_NO_WORKLOAD = (
    "the coordinator declares no workload to train a table with; "
    + hint("xain-coordinator", "--workload sgd")
    + " to its start, or "
    + hint("xain-coordinator", 'workload.name = "sgd"')
    + " in its configuration, or write a Participant of your own"
)
