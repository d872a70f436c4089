"""The configuration of a coordinator: what each key means is told in configs/.

Read by xain_foundation.settings.settings: TOML file, then XAIN_COORDINATOR_SECTION__KEY in the
environment, then flags.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationError, model_validator

from xain_coordinator.config import choices, rule_fits
from xain_coordinator.config.fields import (
    is_plaintext,
)
from xain_coordinator.config.sections.study import as_text, rules_of
from xain_coordinator.config.sections.together import Sections
from xain_coordinator.config.sections.workload import WorkloadSettings
from xain_coordinator.core.vocabulary.values import Rules, Step
from xain_coordinator.extensions.options import options_of
from xain_foundation.settings.fields import (
    Check,
    Conflicts,
    WrongSetting,
    is_loopback,
)
from xain_foundation.settings.hints import hint
from xain_workloads.measures.figures import LOSSES, OF_WEIGHED_CLASSES
from xain_workloads.passes import (
    PATIENCE_ROWS,
    Stride,
    default_patience,
    stride,
)

if TYPE_CHECKING:
    pass

ENV_PREFIX = "XAIN_COORDINATOR_"

# Every assignment carries the whole section.
_MAX_TRAIN_BYTES = 64 * 1024


_OF_SCHEDULER = "is gone: leave it out; `xain-parameter-server scheduler` has it, in [scheduler]"
_NO_INFLUX = 'is gone: metrics.kind = "influxdb" has url, org, bucket and token'


class CoordinatorConfig(Sections):
    """Configuration of a coordinator: all sections, checked."""

    @model_validator(mode="before")
    @classmethod
    def _workload_chooses(cls, given: Any) -> Any:
        """The given settings with the rule, optimiser and options that the workload chooses."""
        return choices.with_choices(given)

    moved: ClassVar[Mapping[str, str]] = {
        "ai": "is called [rounds] now",
        "ai.rounds": "is called rounds.rounds now",
        "ai.epochs": "is called rounds.epochs now",
        "ai.min_participants": "is called rounds.min_participants now",
        "ai.fraction_participants": "is called rounds.fraction_participants now",
        "server.heartbeat_time": "is called server.heartbeat_time_s now",
        "server.heartbeat_timeout": "is called server.heartbeat_timeout_s now",
        "server.thread_pool_workers": "is gone: the server needs no thread for each call",
        "server.max_message_bytes": "is gone: leave it out; weights travel in pieces of 1 MiB",
        "parameters.tls": "is called tls.folder now, for all ports of the coordinator",
        "parameters.insecure": "is called server.insecure now, for all ports of the coordinator",
        "parameters.num_ranges": _OF_SCHEDULER,
        "parameters.worker_lease_s": _OF_SCHEDULER,
        "http.insecure": "is called server.insecure now, which is for all ports",
        "metrics.timeout_s": "is gone: leave it out; training does not wait for the server",
        "metrics.enable": 'is called metrics.kind now: "file", "influxdb" or "none"',
        "metrics.host": _NO_INFLUX,
        "metrics.port": _NO_INFLUX,
        "metrics.user": _NO_INFLUX,
        "metrics.password": _NO_INFLUX,
        "metrics.db_name": _NO_INFLUX,
    }

    @Check
    def _train_can_be_carried(self) -> Conflicts:
        """Check that [train] can be sent to participants: JSON of at most _MAX_TRAIN_BYTES, without
        a key `epochs`."""
        can_be = True
        for key, value in self.train.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                can_be = False
                yield WrongSetting(
                    f"train.{key}",
                    "it must be a number, text, true, false, or a list or table of them",
                )
        if "epochs" in self.train:
            yield WrongSetting(
                "train.epochs",
                hint("xain-coordinator", "rounds.epochs = N")
                + ": participants find it in the same place",
            )
        if can_be and len(json.dumps(self.train)) > _MAX_TRAIN_BYTES:
            largest = max(self.train, key=lambda key: len(json.dumps(self.train[key])))
            yield WrongSetting(
                f"train.{largest}",
                f"the whole section must have at most {_MAX_TRAIN_BYTES} bytes as JSON",
            )

    @Check
    def _rule_takes_stale_updates(self) -> Conflicts:
        """Check that the rule can mix stale updates with the model, where rounds have some."""
        if self.rounds.max_staleness != 0 and not self.aggregation.made_rule().takes_stale:
            key = "pacing" if self.rounds.pacing else "consistency"
            yield WrongSetting(
                "aggregation.rule",
                f'rounds.{key} = "{getattr(self.rounds, key)}" mixes updates with the model '
                'that there is, which only "weighted_average" can do',
            )

    @Check
    def _rule_takes_as_many_updates(self) -> None:
        """Check that the rule can combine the fewest and the most updates of a round. Raises
        WrongSetting."""
        from xain_coordinator.aggregation.aggregator import RuleFailed

        rule = self.aggregation.made_rule()
        for num_updates in (self.rounds.min_participants, self.rounds.max_updates):
            is_most = num_updates != self.rounds.min_participants
            is_open = is_most and self.rounds.max_participants is None
            bound = "; rounds.max_participants bounds them" if is_open else ""
            try:
                rule.check(num_updates)
            except RuleFailed as error:
                raise WrongSetting(
                    "aggregation.rule",
                    f"a round may have {num_updates} updates with these [rounds], and {error}"
                    + bound,
                ) from None
            except Exception as error:  # a plug-in's code runs here, and may raise anything
                raise WrongSetting(
                    "aggregation.rule",
                    f"its check() fails with num_updates = {num_updates}: "
                    f"{type(error).__name__}: {error}",
                ) from error

    @Check
    def _personal_tensors_are_named_once(self) -> Conflicts:
        """Check that not both the remedy "personal" and model.personal keep tensors at the
        sites."""
        if self.workload.remedy == "personal" and self.model.personal:
            yield WrongSetting(
                "model.personal", 'workload.remedy = "personal" keeps tensors, too; set one of both'
            )

    _rule_fits_workload = Check(rule_fits.workload_fits)
    _rule_reads_all = Check(rule_fits.all_is_read)
    _scaffold_fits = Check(rule_fits.scaffold_fits)
    _rule_fits_epochs = Check(rule_fits.epochs_fit)
    _rule_fits_participants = Check(rule_fits.participants_fit)
    _rule_fits_options = Check(rule_fits.options_fit)
    _rule_fits_estimators = Check(rule_fits.estimators_fit)
    _rule_fits_passes = Check(rule_fits.passes_fit)
    _script_fits = Check(rule_fits.script_fits)

    @Check
    def _task_is_that_of_the_workload(self) -> Conflicts:
        """Check that schema.task is the task that the workload trains for."""
        task, trained = self.data_schema.task, self.workload.task
        if task and trained and task != trained:
            yield WrongSetting("schema.task", f'the workload trains for "{trained}"')

    @Check
    def _metric_is_measured(self) -> Conflicts:
        """Check that evaluate.metric is one that the workload's models are measured by."""
        metric, measured = self.evaluate.metric, self.workload.metrics
        if metric and measured and metric not in measured:
            yield WrongSetting(
                "evaluate.metric",
                f"the models of this workload are measured by: {', '.join(measured)}",
            )

    @Check
    def _threshold_has_probabilities(self) -> Conflicts:
        """Check that the workload's models give probabilities, if a threshold is to be chosen."""
        measured = self.workload.metrics
        if self.evaluate.threshold and measured and "auc" not in measured:
            yield WrongSetting(
                "evaluate.threshold", "the models of this workload give no probabilities"
            )

    @Check
    def _checks_are_known(self) -> Conflicts:
        """Check that [checks] names checks of the data that there are."""
        if self.checks:
            from xain_workloads.tables.checks.findings import CHECKS

            for name in self.checks:
                if name not in CHECKS:
                    yield WrongSetting(
                        f"checks.{name}", f"there is no such check; there are: {', '.join(CHECKS)}"
                    )

    @Check
    def _fits_can_be_requested(self) -> Conflicts:
        """Check that a session that waits for the request of a fit can get one, and that the format
        of the store allows a session for each fit."""
        if self.rounds.start == "request" and not self.http.is_on:
            yield WrongSetting("rounds.start", "without http.port nothing could request a fit")
        if self.http.is_on and self.storage.format == "xain-pickle":
            yield WrongSetting(
                "http.port",
                'each fit opens a session; leave it out with storage.format = "xain-pickle"',
            )

    @Check
    def _study_can_be_done(self) -> Conflicts:
        """Check that the other settings allow the several sessions of a study or a search."""
        kind, search = self.study.kind, self.search.is_on
        if kind is None and not search:
            return
        key = "search.options" if search else f"study.{kind}"
        if kind is not None and search:
            yield WrongSetting("search.options", "leave it out, or [study]")
        if self.http.is_on:
            yield WrongSetting("http.port", f"each fit opens a session; leave it out with {key}")
        if self.storage.format == "xain-pickle":
            yield WrongSetting(
                "storage.format", f"XAIN's participants know one session; leave it out with {key}"
            )
        if self.keeps_estimators:
            yield WrongSetting(
                key, "with bagging " + hint("xain-coordinator", "workload.options.publish = true")
            )
        if self.workload.name == "describe" or (
            not self.workload.name and kind not in (None, "model")
        ):
            yield WrongSetting(
                key, "it needs a workload, such as " + hint("xain-coordinator", "--workload sgd")
            )
        if search and self.evaluate.every == 0:
            yield WrongSetting("evaluate.every", "a search compares options by evaluations")

    @Check
    def _options_can_be_searched(self) -> Conflicts:
        """Check that the settings with each option of a search are valid; the first mistake is
        told."""
        from xain_foundation.settings.settings import mistakes

        for number, options in enumerate(self.search.found(), 1):
            whole = self._with_options(options)
            try:
                CoordinatorConfig.model_validate(whole)
            except ValidationError as error:
                told = mistakes(CoordinatorConfig, whole, error)
                yield WrongSetting("search.options", f"option {number}: {'; '.join(told)}")
                return

    @Check
    def _initial_weights_are_read(self) -> Conflicts:
        """Check that rounds.initial_weights is not set with a workload, which makes the model."""
        if self.workload.name and self.rounds.initial_weights is not None:
            yield WrongSetting(
                "rounds.initial_weights",
                "nothing would read it with a workload, which makes the initial model",
            )

    @property
    def access_folder(self) -> Path:
        """The folder of the authority, the audit log and the coordinator's own certificate."""
        return self.journal.path.parent / "access"

    @property
    def certificates(self) -> Path | None:
        """The folder with the certificate of this coordinator; None if it is open to whoever
        reaches it."""
        return self.tls.folder_or(self.access_folder / "tls")

    @property
    def in_the_clear(self) -> tuple[str, ...]:
        """Traffic that leaves this machine without encryption, in words."""
        server, found = self.server, []
        if not is_loopback(server.host):
            if self.certificates is None:
                found.append("calls and weights of the participants (server.insecure)")
            if server.health_port is not None:
                found.append("health checks (server.health_port)")
            if self.aggregation.rule == "assemble":
                found.append("tensors between the participants of a process group")
        if self.http.is_on and not is_loopback(self.http.host) and self.certificates is None:
            found.append("fits and predictions over HTTP (server.insecure)")
        parameters = self.parameters
        is_reached = parameters.is_on and not is_loopback(parameters.host)
        if is_reached and self.certificates is None:
            found.append("tables of the parameter server (server.insecure)")
        for what, url in (
            ("weights to the store (storage.endpoint)", self.storage.endpoint),
            (
                "weights between participants and store (storage.public_endpoint)",
                self.storage.public_endpoint,
            ),
            ("metrics (metrics.url)", self.metrics.url),
        ):
            if is_plaintext(url):
                found.append(what)
        return tuple(found)

    def require_certificates(self) -> None:
        """Check that no others reach an open coordinator, unless that is asked for; called at the
        start, since certificates are made under the same settings. Raises WrongSetting."""
        server, parameters, http = self.server, self.parameters, self.http
        if self.certificates is None and (self.access_folder / "ca.crt").exists():
            # A coordinator that was closed must not open itself because a folder is missing.
            raise WrongSetting(
                "tls.folder",
                f"{self.access_folder} has an authority, but no certificate of this coordinator; "
                "to make one, "
                + hint("xain-coordinator", "xain-coordinator certs renew --host HOST")
                + f", or move {self.access_folder} away if nothing is to be encrypted any more",
            )
        if server.insecure or self.certificates is not None:
            return
        reached = (
            (http.is_on, "http.host", http.host, "fit and predict"),
            (parameters.is_on, "parameters.host", parameters.host, "read and change all tables"),
            (True, "server.host", server.host, "read the model and hand in updates"),
        )
        for is_on, key, host, could in reached:
            if is_on and not is_loopback(host):
                raise WrongSetting(
                    key,
                    f"whoever reaches {host} could {could}, and nothing is encrypted; "
                    "make certificates first, "
                    + hint("xain-coordinator", "xain-coordinator certs init --host HOST")
                    + ", or, in a network that you trust, "
                    + hint("xain-coordinator", "--insecure"),
                )

    @property
    def _has_local_models(self) -> bool:
        """Whether a site can train the workload on its own rows alone. Participants that train one
        network together have the same rows."""
        return bool(self.workload.name) and self.aggregation.rule != "assemble"

    @property
    def _has_importances(self) -> bool:
        """Whether a site can permute the columns of a table, and measure the model. The pixels of
        an image are no columns, which a network takes apart first."""
        layers = getattr(self.workload.made_options, "layers", ())
        is_of_images = any(layer["type"] == "unflatten" for layer in layers)
        return self._has_local_models and not self.keeps_estimators and not is_of_images

    @property
    def _measures_same_rows(self) -> bool:
        """Whether all models are measured on the same rows: of all sites, or the coordinator's."""
        rounds, evaluate = self.rounds, self.evaluate
        has_all = rounds.controller == "all" or rounds.fraction_participants == 1
        is_whole = rounds.consistency == "bsp" and not rounds.pacing and not rounds.quorum
        return evaluate.every > 0 and (bool(evaluate.data) or (has_all and is_whole))

    @property
    def _metric_of_weighed_classes(self) -> str:
        """The metric of models whose rows weigh by their class, and whose log loss says little:
        their probabilities are those of classes of equal size. "" for other models."""
        if not getattr(self.workload.made_options, "class_weight", ""):
            return ""
        return next(name for name in OF_WEIGHED_CLASSES if name in self.workload.metrics)

    @property
    def _metric_of_search(self) -> str:
        """The metric that all options of a search have, where the loss does not compare them: it is
        too high on purpose with class weights, and not known without probabilities. "" for the
        loss."""
        tables = [self._with_options(one)["workload"] for one in self.search.found()]
        every = [WorkloadSettings.model_validate(one) for one in tables]
        if any(getattr(one.made_options, "class_weight", "") for one in every):
            return next(n for n in OF_WEIGHED_CLASSES if all(n in one.metrics for one in every))
        has_losses = all({*LOSSES} & {*one.metrics} for one in every)
        return "" if has_losses else "balanced_accuracy"

    @property
    def stride(self) -> Stride:
        """How rounds of the workload divide a pass: levels of a boosting iteration, or rows of a
        step."""
        mode = ""
        if self.aggregation.rule == "trees":
            mode = str(self.aggregation.whole_options["mode"])
        return stride(self.workload.made_options, mode)

    def _initial(self) -> Literal["first", "empty", "workload"]:
        """How the initial model is made: by the workload, by the first participant, or as an
        average from an empty one."""
        if self.workload.name:
            return "workload"
        # XAIN's participants all make some weights, and know of no other way.
        default = "average" if self.storage.format == "xain-pickle" else "first"
        chosen = self.rounds.initial_weights or default
        return "empty" if chosen == "average" else "first"

    def given(self) -> dict[str, Any]:
        """The sections as they were given, without what the workload has chosen."""
        return choices.without_choices(self.model_dump(by_alias=True, exclude_unset=True))

    def _with_options(self, options: Mapping[str, str]) -> dict[str, Any]:
        """The settings without a study, and with these options by dotted key, as JSON."""
        # Rule, optimiser and options that the workload chose before are chosen anew.
        whole = {key: part for key, part in self.given().items() if key not in ("study", "search")}
        for key, text in options.items():
            *path, name = key.split(".")
            table = whole
            for part in path:
                table = table.setdefault(part, {})
            table[name] = json.loads(text)
        return whole

    def rules_of_averaging(self) -> Rules:
        """The rules of a session that averages a network, as version 0.1 did, where these settings
        have it send gradients without saying so; else those of a new session."""
        given = self.given()
        own = dict(given.get("workload", {}).get("options", {}))
        if own == self.workload.options:
            return self.rules()
        averaged = {**given.get("workload", {}), "options": {**own, "mode": "federated"}}
        rules = CoordinatorConfig.model_validate({**given, "workload": averaged}).rules()
        return replace(rules, workload_options=json.dumps(own, sort_keys=True) if own else "")

    def rules(self, step: Step | None = None) -> Rules:
        """The rules of a new session. step: its part in a study, whose options prevail."""
        study = as_text(self.study, self.search, self.passes or self.num_rounds)
        if step is None:
            return replace(self._rules(), study=study)
        config = self
        if step.options:
            config = CoordinatorConfig.model_validate(self._with_options(step.options))
        rules = replace(config._rules(), study=study)
        if self.search.is_on and self.workload.name and not self.evaluate.metric:
            rules = replace(rules, evaluate_metric=self._metric_of_search)
        return rules_of(step, rules)

    def _rules(self) -> Rules:
        """The rules of a session that is of no study."""
        rounds, aggregation, evaluate = self.rounds, self.aggregation, self.evaluate
        options = self.workload.whole_options
        stages = {"stages": self.num_stages} if aggregation.rule == "assemble" else {}
        describes = self.workload.name == "describe"
        passes = 0 if describes else self.passes
        patience = evaluate.patience
        if patience is None:
            patience = default_patience(passes) if passes and self._measures_same_rows else 0
        is_averaged = not choices.is_own(aggregation.rule)
        return Rules(
            # With passes those of one site, until the first round opens.
            rounds=0 if describes else passes or self.num_rounds,
            epochs=rounds.effective_epochs,
            min_participants=rounds.min_participants,
            fraction_participants=rounds.fraction_participants,
            num_required=rounds.num_required,
            max_participants=rounds.effective_max_participants,
            start_participants=rounds.effective_start_participants,
            start_timeout_s=rounds.start_timeout_s,
            expected_participants=rounds.expected_participants,
            start=rounds.start or ("request" if self.http.is_on else "participants"),
            controller=rounds.controller,
            controller_options=rounds.whole_controller_options,
            tags=rounds.tags,
            refused_limit=rounds.refused_limit,
            refused_rounds=rounds.refused_rounds,
            max_lost_share=rounds.max_lost_share,
            max_share=rounds.max_share,
            scripted=rounds.scripted,
            evaluate_every=(
                0 if self.keeps_estimators or describes else rule_fits.evaluated_every(self)
            ),
            evaluate_metric=evaluate.metric or self._metric_of_weighed_classes,
            evaluate_minimised=evaluate.is_minimised,
            evaluate_patience=patience,
            evaluate_patience_rows=PATIENCE_ROWS if patience and evaluate.patience is None else 0,
            evaluate_min_delta=evaluate.min_delta,
            evaluate_data=bool(evaluate.data),
            evaluate_deadline_s=evaluate.deadline_s,
            evaluate_min_rows=evaluate.min_rows,
            evaluate_threshold=evaluate.threshold,
            evaluate_local=evaluate.local and self._has_local_models,
            evaluate_importance=evaluate.importance and self._has_importances,
            train_config=json.dumps(self.train, sort_keys=True) if self.train else "",
            aggregation=aggregation.rule,
            aggregation_options={**aggregation.whole_options, **stages},
            optimizer=aggregation.optimizer,
            optimizer_options=options_of(aggregation.made_optimizer(), {}),
            seed=rounds.seed,
            passes=passes,
            plans_epochs=bool(passes) and rounds.epochs is None and is_averaged,
            stride=self.stride,
            heartbeat_time_s=self.server.heartbeat_time_s,
            heartbeat_timeout_s=self.server.heartbeat_timeout_s,
            workload=self.workload.name,
            workload_options=(
                json.dumps(options, sort_keys=True)
                if (options := self.workload.whole_options)
                else ""
            ),
            preprocessing=self.workload.preprocessing.model_dump_json(exclude_none=True),
            initial=self._initial(),
            pacing=rounds.pacing,
            pacing_options=rounds.whole_pacing_options,
            deadline_s=rounds.deadline_s,
            idle_timeout_s=rounds.idle_timeout_s,
            quorum=rounds.quorum,
            over_selection=rounds.over_selection,
            consistency=rounds.consistency,
            staleness=rounds.max_staleness,
            buffer_size=rounds.buffer_size or rounds.min_participants,
            schema=self.data_schema.agreed(self.workload.task),
        )
