"""The section [rounds]: how many train, when a round closes, and that it can."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from pydantic import Field

from xain_coordinator.config.fields import (
    MAX_PARTICIPANTS,
    ExactExcess,
    ExactFraction,
    Quorum,
    TagValues,
)
from xain_coordinator.config.named import naming
from xain_coordinator.core.rules import pacing
from xain_coordinator.core.vocabulary.values import Consistency, Option
from xain_coordinator.extensions.options import options_of
from xain_coordinator.extensions.strategies import (
    known_controllers,
    known_pacings,
    make_controller,
    make_pacing,
)
from xain_foundation.conditional_events import parse
from xain_foundation.names import shortened, why_not
from xain_foundation.settings import tags as tag_rules
from xain_foundation.settings.fields import Check, Conflicts, Section, Texts, WrongSetting
from xain_wire.limits import MAX_INT32
from xain_workloads.passes import MAX_ROUNDS, ROUNDS

# Participants that may be connected, unless it is set or more are needed: a bound for memory, which
# no group of sites meets by chance.
DEFAULT_MAX_PARTICIPANTS = 1000

_MAX_WAIT_S = 366 * 24 * 3600.0  # longer than this is for ever


class RoundsSettings(Section):
    """[rounds]"""

    rounds: int | None = Field(default=None, ge=1, le=MAX_ROUNDS)
    passes: int | None = Field(default=None, ge=1, le=MAX_ROUNDS)
    epochs: int | None = Field(default=None, ge=0, le=MAX_INT32)
    initial_weights: Literal["first", "average"] | None = None
    min_participants: int = Field(default=1, ge=1, le=MAX_PARTICIPANTS)
    fraction_participants: ExactFraction = Fraction(1)
    max_participants: int | None = Field(default=None, ge=1, le=MAX_PARTICIPANTS)
    start_participants: int | None = Field(default=None, ge=1, le=MAX_PARTICIPANTS)
    expected_participants: Texts = ()
    start_timeout_s: float = Field(default=60.0, ge=0, le=_MAX_WAIT_S)
    start: Literal["participants", "request"] | None = None
    controller: str = "random"
    controller_options: dict[str, Option] = Field(default_factory=dict)
    tags: dict[str, TagValues] = Field(default_factory=dict)
    # Each refusal is written down, so that their number must have a bound.
    refused_limit: int = Field(default=3, ge=0, le=100)
    refused_rounds: int = Field(default=3, ge=0, le=MAX_ROUNDS)
    max_lost_share: float = Field(default=0.2, ge=0, le=1)
    max_share: float = Field(default=0.5, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    over_selection: ExactExcess = Fraction(0)
    quorum: Quorum = ""
    pacing: str = ""
    pacing_options: dict[str, Option] = Field(default_factory=dict)
    deadline_s: float = Field(default=24 * 3600.0, gt=0, le=_MAX_WAIT_S)
    idle_timeout_s: float = Field(default=7 * 24 * 3600.0, gt=0, le=_MAX_WAIT_S)
    consistency: Consistency = "bsp"
    staleness: int | None = Field(default=None, ge=1, le=MAX_INT32)
    buffer_size: int | None = Field(default=None, ge=1, le=MAX_INT32)
    scripted: bool = False

    @property
    def num_required(self) -> int:
        """N: how many must be connected for a round to be open."""
        return pacing.num_required(self.min_participants, self.fraction_participants)

    @property
    def num_selected(self) -> int:
        """k: how many train a round when N are connected."""
        return self._num_selected(self.num_required)

    @property
    def max_selected(self) -> int:
        """Participants that train a round when max_participants are connected."""
        return self._num_selected(self.effective_max_participants)

    @property
    def max_updates(self) -> int:
        """The most updates that a model may be made of."""
        if self.over_selection and not self.quorum:
            return pacing.num_wanted(self.effective_max_participants, self.fraction_participants)
        return self.max_selected

    def _num_selected(self, num_connected: int) -> int:
        """Participants that train a round when so many are connected."""
        if self.controller == "all":
            return num_connected
        return pacing.num_selected(num_connected, self.fraction_participants, self.over_selection)

    @property
    def whole_controller_options(self) -> Mapping[str, Option]:
        """Options of the controller: those that are given, and the defaults of the others."""
        made = make_controller(self.controller, self.controller_options)
        return options_of(made, self.controller_options)

    @property
    def whole_pacing_options(self) -> Mapping[str, Option]:
        """Options of the pacing rule: those that are given, and the defaults of the others."""
        if not self.pacing:
            return {}
        made = make_pacing(self.pacing, self.pacing_options)
        return options_of(made.rule, self.pacing_options)

    @property
    def max_staleness(self) -> int | None:
        """Rounds that an update may be behind, as the pacing rule says; None: any number."""
        if self.pacing:
            return make_pacing(self.pacing, self.pacing_options).max_staleness()
        return None if self.consistency == "asp" else self.staleness or 0

    @property
    def effective_start_participants(self) -> int:
        """Participants that the first round waits for: as set, or else those required or
        expected."""
        return self.start_participants or max(self.num_required, len(self.expected_participants))

    @property
    def effective_max_participants(self) -> int:
        """Number of participants that may be connected: as set, or else 1,000, or more if more are
        to start with."""
        if self.max_participants is not None:
            return self.max_participants
        return max(DEFAULT_MAX_PARTICIPANTS, self.effective_start_participants)

    @property
    def effective_epochs(self) -> int:
        """Epochs of a round, as far as the settings say."""
        return 1 if self.epochs is None else self.epochs

    @Check
    def _length_is_given_once(self) -> Conflicts:
        """Check that passes come without a number of rounds, and with epochs."""
        if self.passes is None:
            return
        if self.rounds is not None:
            yield WrongSetting(
                "passes",
                f"rounds.rounds = {self.rounds} is given too; keep one of them: rounds follow from "
                "passes over all rows",
            )
        elif self.epochs == 0:
            yield WrongSetting("epochs", "rounds.passes are made of epochs; set it to 1 or more")

    @Check
    def _epochs_can_be_counted(self) -> Conflicts:
        """Check that the epochs of all rounds fit into an int32, as the wire carries them."""
        rounds, epochs = self.rounds or ROUNDS, self.effective_epochs
        if rounds * epochs > MAX_INT32:
            yield WrongSetting(
                "epochs",
                f"with rounds.rounds = {rounds} that comes to {rounds * epochs} epochs, and at "
                f"most {MAX_INT32} can be counted",
            )

    @Check
    def _enough_can_be_connected(self) -> Conflicts:
        """Check that the participants required are no more than may start and be connected."""
        required = self.num_required
        if required > MAX_PARTICIPANTS:
            yield WrongSetting(
                "fraction_participants",
                f"rounds.min_participants = {self.min_participants} need {required} "
                f"connected participants at this fraction, and at most {MAX_PARTICIPANTS} can be "
                "connected",
            )
            return
        # Where N comes from, since it is in no file.
        because = (
            f"the {required} connected participants that min_participants = {self.min_participants}"
            f" at fraction_participants = {self.fraction_participants} need"
        )
        start = self.effective_start_participants
        if start < required:
            yield WrongSetting("start_participants", f"it must not be less than {because}")
        most = self.effective_max_participants
        if most < required:
            yield WrongSetting("max_participants", f"it must not be less than {because}")
        elif start > most:
            key = "start_participants" if self.start_participants else "expected_participants"
            yield WrongSetting(key, f"it must not be more than max_participants, {most}")

    @Check
    def _expected_can_join(self) -> Conflicts:
        """Check that the expected participants have valid names, each once."""
        names = self.expected_participants
        for name in names:
            if (why := why_not(name)) is not None:
                yield WrongSetting(
                    "expected_participants",
                    f"{shortened(repr(name))} cannot be the name of a participant: {why}",
                )
                return
        if len({*names}) < len(names):
            yield WrongSetting("expected_participants", "a name is given twice")

    @Check
    def _controller_can_be_made(self) -> None:
        """Check that the controller exists and takes its options."""
        with naming("controller", "controller_options", known_controllers):
            _ = self.whole_controller_options

    @Check
    def _tags_can_be_met(self) -> Conflicts:
        """Check that participants can have the tags that a selection asks for."""
        for key in self.tags:
            if (why := tag_rules.why_not_key(key)) is not None:
                yield WrongSetting(f"tags.{key}", f"no participant can have such a tag: {why}")

    # A round that these settings describe can be complete.

    @Check
    def _consistency_is_whole(self) -> Conflicts:
        """Check that each kind of consistency has the settings that it needs, and no others."""
        if self.consistency == "bsp":
            for name in self.changed("staleness", "buffer_size"):
                yield WrongSetting(name, 'nothing would read it with consistency = "bsp"')
            return
        for name in self.changed("over_selection", "quorum"):
            yield WrongSetting(
                name,
                f'with consistency = "{self.consistency}" a model is made of every '
                "rounds.buffer_size updates; leave this one out",
            )
        if self.consistency == "ssp" and self.staleness is None:
            yield WrongSetting("staleness", 'it must be given with consistency = "ssp"')
        if self.consistency == "asp" and self.staleness is not None:
            yield WrongSetting("staleness", 'there is no limit with consistency = "asp"; use "ssp"')

    @Check
    def _buffer_can_be_full(self) -> Conflicts:
        """Check that rounds.buffer_size is a number of updates that can come."""
        if self.consistency == "bsp" or self.buffer_size is None:
            return
        least, most = self.min_participants, self.max_selected
        if least <= most and not least <= self.buffer_size <= most:
            yield WrongSetting(
                "buffer_size",
                f"it must be from min_participants, {least}, to the number that trains at a time, "
                f"{most}",
            )

    @Check
    def _more_can_be_selected(self) -> Conflicts:
        """Check that over-selection has participants that would not be selected without it."""
        is_everybody = self.controller == "all" or self.fraction_participants == 1
        if self.consistency == "bsp" and self.over_selection and is_everybody:
            yield WrongSetting(
                "over_selection",
                "everybody is selected without it; it needs a fraction_participants below 1 and "
                'another controller than "all"',
            )

    @Check
    def _pacing_closes_rounds(self) -> Conflicts:
        """Check that a pacing rule can be made and answers sensibly, and that nothing else closes
        rounds."""
        if not self.pacing:
            if self.pacing_options:
                yield WrongSetting("pacing_options", "nothing would read it without rounds.pacing")
            return
        for name in self.changed("consistency", "quorum"):
            yield WrongSetting(
                name, f'with pacing = "{self.pacing}" that rule closes rounds; leave this out'
            )
        with naming("pacing", "pacing_options", known_pacings):
            made = make_pacing(self.pacing, self.pacing_options)
            _ = self.whole_pacing_options, made.closes_initial_round()
            limit, wait_s = made.max_staleness(), made.shortest_wait_s()
        if limit is not None and not 0 <= limit <= MAX_INT32:
            yield WrongSetting("pacing", f"{self.pacing!r} answers max_staleness: {limit}")
        if wait_s is not None and wait_s <= 0:
            yield WrongSetting("pacing", f"{self.pacing!r} answers shortest_wait_s: {wait_s}")

    @Check
    def _quorum_can_be_met(self) -> Conflicts:
        """Check that the quorum can be parsed, and that each of its parts can happen in a round."""
        if self.consistency != "bsp" or not self.quorum:
            return
        try:
            condition = parse(self.quorum)
        except ValueError as error:
            yield WrongSetting("quorum", str(error))
            return
        for unit in condition.units:
            is_one = unit.source not in ("*", pacing.PEER_TYPE)
            most = 1 if is_one else self.max_selected
            if (
                unit.tag not in ("*", pacing.TAG)
                or (is_one and why_not(unit.source) is not None)
                or (unit.count is not None and unit.count > most)
            ):
                yield WrongSetting(
                    "quorum",
                    f'"{unit}" never happens: a round gets one "{pacing.TAG}" from each of at most '
                    f"{self.max_selected} participants",
                )
                return
