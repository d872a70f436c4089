"""The simulated session, its fleet and its faults. All of it is drawn from a seed, or by
hypothesis, and can be printed."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from random import Random
from typing import Any

from simulation.network import Noise
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.values import Rules


class Kind(StrEnum):
    """Kinds of faults. The meaning of Fault's numbers stands beside each."""

    KILL_COORDINATOR = "kill coordinator"  # after `count` more steps; back after `seconds`
    KILL_COORDINATOR_IN_IO = "kill coordinator in io"  # at its `count`th touch of disk or store
    CUT_POWER = "cut power"  # as a kill, and what was not durable may be gone
    LOSE_HOST = "lose host"  # as a kill, but nobody is told
    OVERTAKE = "overtake"  # another coordinator goes on with a copy of its disk; it wakes after
    # `seconds`
    STOP_COORDINATOR = "stop coordinator"  # by SIGTERM; back after `seconds`
    JOURNAL_FAILS = "journal fails"  # for `seconds`
    SLOW_DISK = "slow disk"  # for `seconds`
    STORE_DOWN = "store down"  # for `seconds`
    KILL_PARTICIPANT = "kill participant"  # after `count` more steps; back after `seconds`
    STOP_PARTICIPANT = "stop participant"  # by SIGTERM; back after `seconds`
    CUT_POWER_OF_PARTICIPANT = "cut power of participant"  # as a kill, and what its state directory
    # has not made durable may be as it was
    FREEZE_PARTICIPANT = "freeze participant"  # takes no step for `seconds`, then goes on
    PARTITION = "partition"  # of one or all, for `seconds`
    HALF_OPEN = "half open"  # its connection is dead, and nobody is told; odd `count`: a machine on
    # the way still acknowledges what is sent
    BREAK = "break"  # its connection is reset
    WALL_CLOCK = "wall clock"  # jumps by `seconds`, which must not matter
    KILL_SCRIPT = "kill script"  # after `count` more steps; back after `seconds`


# Of what befalls participants.
EVERYBODY = -1

SCRIPTED = 0.2  # share of the sessions that a script may drive


@dataclass(frozen=True, slots=True)
class Fault:
    """at: seconds after the beginning. who: number of a participant, or EVERYBODY."""

    kind: Kind
    at: float
    seconds: float = 0.0
    count: int = 0
    who: int = EVERYBODY


@dataclass(frozen=True, slots=True)
class Scenario:
    """seed: of all chance that is left to the run itself, such as how long a message takes.

    num_floats: of the model. train_s: how long a round's training takes each participant.
    gone: those who leave for good, without a word, and when.
    bad: those who send updates that are not finite, or too long, and which part of theirs are so.
    is_inline: weights travel inside calls, else in streams of chunks. is_direct: or past the
        coordinator, by URLs. keeps_parts: a part of an upload outlives its coordinator.
    encoding: of updates that do not travel inside calls.
    keeps_results: participants have a state directory. snapshot_records: see driver.py.
    clock_rates: of the participants' clocks, and at the end of the coordinator's; empty: all run
        as they should.
    keep_updates, keep_models: see Retention.
    has_control: the model has a control variate, as long as the rest, and participants keep their
        own beside their results.
    evaluators: those who can evaluate models.
    without_weights: those who cannot make initial weights.
    scripted: a script drives the session; see plan.py. script_s: how long it takes to decide.
    quiet_at: from then on nothing happens any more that should not.
    """

    seed: int
    rounds: int = 2
    num_participants: int = 2
    min_participants: int = 2
    start_participants: int = 2
    fraction: Fraction = Fraction(1)
    controller: str = "random"
    rule: str = "weighted_average"
    options: tuple[tuple[str, int | float], ...] = ()
    optimizer: str = ""
    epochs: int = 1
    initial: str = "empty"
    num_floats: int = 3
    dtype: str = "float32"
    heartbeat_time_s: float = 5.0
    heartbeat_timeout_s: float = 5.0
    deadline_s: float = 24 * 3600.0
    idle_timeout_s: float = 7 * 24 * 3600.0
    quorum: str = ""
    pacing: str = ""
    pacing_options: tuple[tuple[str, float], ...] = ()
    over_selection: Fraction = Fraction(0)
    consistency: str = "bsp"
    staleness: int | None = None
    buffer_size: int | None = None
    train_s: tuple[float, ...] = (1.0, 1.0)
    gone: tuple[tuple[int, float], ...] = ()
    bad: tuple[tuple[int, float], ...] = ()
    refused_limit: int = 3
    is_inline: bool = True
    is_direct: bool = False
    keeps_parts: bool = False
    encoding: str = "plain"
    keeps_results: bool = False
    clock_rates: tuple[float, ...] = ()
    snapshot_records: int = 10_000
    keep_updates: int | None = None
    keep_models: int | None = None
    has_control: bool = False
    evaluators: tuple[int, ...] = ()
    without_weights: tuple[int, ...] = ()
    evaluate_every: int = 1
    evaluate_deadline_s: float = 600.0
    scripted: bool = False
    script_s: float = 1.0
    noise: Noise = field(default_factory=Noise)
    faults: tuple[Fault, ...] = ()
    quiet_at: float = 0.0

    def rules(self) -> Rules:
        """Rules as a configuration gives them. Raises ValidationError, where it cannot be."""
        rounds: dict[str, Any] = {
            "rounds": self.rounds,
            "epochs": self.epochs,
            "min_participants": self.min_participants,
            "fraction_participants": self.fraction,
            "start_participants": self.start_participants,
            "max_participants": self.num_participants,
            "start_timeout_s": 20.0,
            "controller": self.controller,
            "seed": self.seed,
            "deadline_s": self.deadline_s,
            "idle_timeout_s": self.idle_timeout_s,
            "quorum": self.quorum,
            "pacing": self.pacing,
            "pacing_options": dict(self.pacing_options),
            "over_selection": self.over_selection,
            "consistency": self.consistency,
            "staleness": self.staleness,
            "buffer_size": self.buffer_size,
            "refused_limit": self.refused_limit,
            "refused_rounds": 2,
            "scripted": self.scripted,
        }
        if self.scripted:
            # A script may choose participants by name before they have come.
            names = [f"p{index}" for index in range(self.num_participants)]
            rounds["expected_participants"] = names
        config = CoordinatorConfig.model_validate(
            {
                "server": {
                    "heartbeat_time_s": self.heartbeat_time_s,
                    "heartbeat_timeout_s": self.heartbeat_timeout_s,
                    "update_encoding": self.encoding,
                },
                "rounds": rounds,
                "evaluate": {"every": self.evaluate_every, "deadline_s": self.evaluate_deadline_s},
                "aggregation": {
                    "rule": self.rule,
                    "options": dict(self.options),
                    "optimizer": self.optimizer,
                },
            }
        )
        initial: Any = self.initial
        return replace(config.rules(), initial=initial)

    @property
    def needs_everybody(self) -> bool:
        """Every round is made of all updates, so faults leave no mark on the result."""
        return (
            self.min_participants == self.num_participants
            and self.fraction == 1
            and self.consistency == "bsp"
            and not self.gone
            and not self.bad
            and (self.keeps_results or not self.has_control)  # a lost variate leaves a mark
        )

    @property
    def is_encoded(self) -> bool:
        """Updates of a model that there is travel encoded."""
        return self.encoding != "plain" and self.dtype == "float32" and not self.is_inline

    @property
    def is_quiet(self) -> bool:
        """Nothing goes wrong, and all are there."""
        noise = self.noise
        return not (
            self.faults or self.gone or self.bad or noise.lost or noise.duplicated or noise.slow
        )

    def clock_rate(self, index: int) -> float:
        """The clock rate of a participant; -1: of the coordinator."""
        return self.clock_rates[index] if self.clock_rates else 1.0

    @property
    def can_fail(self) -> bool:
        """The session may end without a result, as its rules say."""
        return self.idle_timeout_s < 3600.0

    @property
    def bound_s(self) -> float:
        """Seconds that the session may still take after the last fault.

        Lines that are dead without a word are found out by keepalives; a lease runs out, and a
        back-off; each round trains, twice if somebody has to take over, and has a deadline.
        """
        lease_s = self.heartbeat_time_s + self.heartbeat_timeout_s
        train_s = max(self.train_s) / min(self.clock_rates, default=1.0)
        deadline_s = min(self.deadline_s, 2 * train_s)
        idle_s = self.idle_timeout_s if self.can_fail else 0.0
        a_round_s = deadline_s + 2 * train_s + 3 * lease_s + 60.0
        # A call and a stream of a script may stall, and each of its decisions takes a few of them.
        script_s = 4 * (2 * self.script_s + 100.0) if self.scripted else 0.0
        return 400.0 + idle_s + (self.rounds + 1) * (a_round_s + script_s)


def from_seed(seed: int) -> Scenario:
    chance = Random(f"scenario {seed}")
    scenario = _session(chance, seed)
    # By a chance of its own, so that it decides nothing else of what a seed stands for.
    of_controller = Random(f"controller {seed}")
    if scenario.controller != "all" and of_controller.random() < 0.4:
        controller = of_controller.choice(("round_robin", "weighted"))
        scenario = replace(scenario, controller=controller)
    if scenario.initial == "empty" and Random(f"initial {seed}").random() < 0.5:
        scenario = replace(scenario, initial="first")
    kept = Random(f"keep_updates {seed}").choice((0, 0, 1, None))
    of_encoding = Random(f"encoding {seed}")
    encoding = of_encoding.choice(("plain", "plain", "float16", "float16"))
    if encoding != "plain" and not scenario.is_inline and of_encoding.random() < 0.7:
        scenario = replace(scenario, dtype="float32")  # of another one nothing is encoded
    kept_models = Random(f"keep_models {seed}").choice((None, None, 1, 2))
    scenario = replace(scenario, keep_updates=kept, keep_models=kept_models, encoding=encoding)
    scenario = _aggregation(Random(f"aggregation {seed}"), scenario)
    of_store = Random(f"store {seed}")
    if not scenario.is_inline:
        is_direct, keeps_parts = of_store.random() < 0.4, of_store.random() < 0.7
        num_floats = scenario.num_floats + of_store.choice((0, 20, 60))
        scenario = replace(
            scenario, is_direct=is_direct, keeps_parts=keeps_parts, num_floats=num_floats
        )
    of_clocks = Random(f"clocks {seed}")
    if of_clocks.random() < 0.5:
        num_clocks = scenario.num_participants + 1
        rates = tuple(of_clocks.uniform(0.95, 1.05) for _ in range(num_clocks))
        scenario = replace(scenario, clock_rates=rates)
    of_evaluation = Random(f"evaluation {seed}")
    if of_evaluation.random() < 0.4:
        everybody = range(scenario.num_participants)
        scenario = replace(
            scenario,
            evaluators=tuple(i for i in everybody if of_evaluation.random() < 0.7),
            evaluate_every=of_evaluation.choice((1, 1, 2)),
            evaluate_deadline_s=of_evaluation.choice((2.0, 600.0)),
        )
    scenario = _fleet(chance, scenario)
    scenario = _pacing(Random(f"pacing {seed}"), scenario)
    of_control = Random(f"control {seed}")
    if of_control.random() < 0.25 and scenario.consistency == "bsp":
        scenario = _with_control(of_control, scenario)
    if scenario.initial == "first":
        scenario = _without_weights(Random(f"without weights {seed}"), scenario)
    return _scripted(Random(f"script {seed}"), _faults(chance, scenario))


def _scripted(chance: Random, scenario: Scenario) -> Scenario:
    """In some of the sessions a script configures the rounds, and is killed now and then."""
    if chance.random() >= SCRIPTED or scenario.consistency != "bsp" or scenario.epochs == 0:
        return scenario
    script_s = chance.choice((0.1, 1.0, 30.0, 200.0))
    horizon_s = scenario.quiet_at + scenario.rounds * script_s
    killed = tuple(
        Fault(
            Kind.KILL_SCRIPT,
            at=chance.random() * horizon_s,
            seconds=chance.choice((0.1, 1.0, 20.0)) * chance.random(),
            count=int(40 * chance.random() ** 2),
        )
        for _ in range(chance.choice((0, 1, 2, 5)))
    )
    faults = sorted((*scenario.faults, *killed), key=lambda fault: fault.at)
    return replace(
        scenario, scripted=True, script_s=script_s, faults=tuple(faults), quiet_at=horizon_s + 20.0
    )


def _with_control(chance: Random, scenario: Scenario) -> Scenario:
    """A control variate, and what it needs. In sessions that do not need all, most updates of the
    slow ones come too late, and some later ones count."""
    dtype = "float64" if scenario.dtype == "float64" else "float32"
    scenario = replace(
        scenario,
        has_control=True,
        dtype=dtype,
        rule="weighted_average",
        options=(),
        encoding="plain",
    )
    if not scenario.needs_everybody and chance.random() < 0.7:
        quorum = f"*:update:{scenario.min_participants}"
        rounds = scenario.rounds + 4
        scenario = replace(scenario, rounds=rounds, quorum=quorum, pacing="", pacing_options=())
    return scenario


def _without_weights(chance: Random, scenario: Scenario) -> Scenario:
    """In half of the sessions some cannot make initial weights; one that stays always can."""
    trouble = {i for i, _ in (*scenario.gone, *scenario.bad)}
    everybody = range(scenario.num_participants)
    able = [i for i in everybody if i not in trouble]
    if not able or chance.random() < 0.5:
        return scenario
    last = chance.choice(able)
    others = tuple(i for i in everybody if i != last and chance.random() < 0.5)
    return replace(scenario, without_weights=others)


def _session(chance: Random, seed: int) -> Scenario:
    n = chance.choice((1, 2, 2, 3, 3, 4, 5))
    rounds = chance.randint(1, 4)
    if chance.random() < 0.05:  # now and then more of either
        n = chance.randint(6, 9)
    if chance.random() < 0.05:
        rounds = chance.randint(5, 8)
    rule = chance.choice(("weighted_average",) * 4 + ("mean", "sum"))
    scenario = Scenario(
        seed=seed,
        rounds=rounds,
        num_participants=n,
        min_participants=n,
        start_participants=n,
        controller=chance.choice(("random", "ordered", "all")),
        rule="identity" if n == 1 and chance.random() < 0.3 else rule,
        epochs=chance.randint(0, 3),
        initial=chance.choice(("empty", "workload")),
        num_floats=chance.randint(1, 8),
        dtype=chance.choice(("float32", "float64", "float16")),
        heartbeat_time_s=chance.choice((1.0, 3.0, 10.0)),
        heartbeat_timeout_s=chance.choice((2.0, 5.0)),
        is_inline=chance.random() < 0.5,
        keeps_results=chance.random() < 0.5,
        snapshot_records=chance.choice((1, 5, 10_000)),
    )
    if n > 1 and chance.random() < 0.5:
        scenario = _partial(chance, scenario)
    return scenario


def _aggregation(chance: Random, scenario: Scenario) -> Scenario:
    """A rule that sorts or surveys, and an optimiser; of neither in most sessions."""
    least = scenario.min_participants
    if scenario.consistency == "bsp" and scenario.rule != "identity" and chance.random() < 0.4:
        options: dict[str, tuple[tuple[str, int | float], ...]] = {
            "median": (),
            "trimmed_mean": (("trim", (least - 1) // 2),),
            "geometric_median": (("max_iterations", chance.choice((500, 1000))),),
            "norm_clipping": chance.choice(
                ((("quantile", 0.5),), (("threshold", 0.5),), (("threshold", 20.0),))
            ),
            "centred_clipping": (("tau", chance.choice((0.0, 0.5, 20.0))), ("num_iterations", 2)),
        }
        if least >= 3:
            num_byzantine = chance.randint(0, (least - 3) // 2)
            options["krum"] = options["multi_krum"] = (("num_byzantine", num_byzantine),)
        rule = chance.choice(list(options))
        scenario = replace(scenario, rule=rule, options=options[rule])
    if scenario.rule != "sum" and chance.random() < 0.3:
        optimizer = chance.choice(("fedavgm", "fedadagrad", "fedadam", "fedyogi"))
        scenario = replace(scenario, optimizer=optimizer)
    return scenario


def _partial(chance: Random, scenario: Scenario) -> Scenario:
    """A scenario that does not need all participants."""
    n = scenario.num_participants
    if chance.random() < 0.4:
        staleness = chance.choice((None, 1, 1, 2))
        least = chance.randint(1, n)
        return replace(
            scenario,
            rounds=scenario.rounds + 1,  # nobody is behind in the first ones
            rule="weighted_average",
            min_participants=least,
            start_participants=chance.randint(least, n),
            consistency="asp" if staleness is None else "ssp",
            staleness=staleness,
            buffer_size=chance.randint(least, n),
        )
    least = chance.randint(1, n - 1)
    fraction = chance.choice((Fraction(1), Fraction(1, 2), Fraction(2, 3)))
    if int((least - 1) / fraction) + 1 > n:
        fraction = Fraction(1)
    if fraction < 1 and chance.random() < 0.5:
        controller = chance.choice(("random", "ordered"))  # another one selects all anyway
        scenario = replace(scenario, controller=controller, over_selection=Fraction(1, 2))
    scenario = replace(scenario, min_participants=least, fraction=fraction)
    required = int((least - 1) / fraction) + 1
    scenario = replace(scenario, start_participants=chance.randint(required, n))
    if chance.random() < 0.4:
        quorum = chance.choice(("participant:update:50%", "*:update:1", f"*:update:{least}"))
        scenario = replace(scenario, quorum=quorum)
    return scenario


def _pacing(chance: Random, scenario: Scenario) -> Scenario:
    """In some sessions a rule with a name closes rounds, earlier than the slowest hand in."""
    is_open = scenario.consistency == "bsp" and not scenario.quorum
    if not is_open or chance.random() < 0.6:
        return scenario
    seconds = max(0.5, chance.random() * max(scenario.train_s))
    return replace(scenario, pacing="after_first", pacing_options=(("seconds", seconds),))


def _fleet(chance: Random, scenario: Scenario) -> Scenario:
    n = scenario.num_participants
    train_s = [chance.choice((0.1, 1.0, 5.0)) * (0.5 + chance.random()) for _ in range(n)]
    if chance.random() < 0.3:
        scenario = replace(scenario, deadline_s=chance.choice((5.0, 30.0)))
        train_s[chance.randrange(n)] = chance.choice((50.0, 150.0))  # a straggler
    if chance.random() < 0.15:
        scenario = replace(scenario, idle_timeout_s=chance.choice((30.0, 120.0)))
    scenario = replace(scenario, train_s=tuple(train_s))
    num_spare = n - scenario.rules().num_required
    num_gone = chance.randint(0, num_spare) if chance.random() < 0.5 else 0
    if scenario.can_fail and chance.random() < 0.3:
        num_gone = min(n, num_spare + 1)  # too many
    gone = chance.sample(range(n), num_gone)
    scenario = replace(scenario, gone=tuple((who, chance.random() * 30.0) for who in sorted(gone)))
    left = sorted(set(range(n)) - set(gone))
    num_bad = min(len(left), max(0, num_spare - num_gone))
    if chance.random() < 0.5:
        num_bad = 0
    bad = sorted(chance.sample(left, num_bad))
    shares = tuple((who, chance.choice((0.3, 0.6, 1.0))) for who in bad)
    return replace(scenario, bad=shares, refused_limit=chance.choice((0, 0, 0, 1, 2, 3)))


# They meet what is half-done.
_WORST = (Kind.KILL_COORDINATOR_IN_IO,) * 4 + (
    Kind.KILL_COORDINATOR,
    Kind.KILL_PARTICIPANT,
    Kind.KILL_PARTICIPANT,
    Kind.OVERTAKE,
)


def _faults(chance: Random, scenario: Scenario) -> Scenario:
    lasts_s = 3.0 + scenario.rounds * (1.0 + min(max(scenario.train_s), scenario.deadline_s))
    horizon_s = lasts_s * chance.choice((1.0, 2.0))
    noise = Noise(slow_s=chance.choice((0.1, 2.0, 20.0)))
    if chance.random() < 0.6:
        noise.lost, noise.duplicated, noise.slow = (
            chance.choice((0.0, 0.02, 0.1)) for _ in range(3)
        )
    # Few kinds at a time: of all together, each hides what the others do.
    known = [kind for kind in Kind if kind is not Kind.KILL_SCRIPT]  # see _scripted
    kinds = chance.sample([*known, *_WORST], chance.randint(1, 4))
    faults = tuple(
        Fault(
            kind=chance.choice(kinds),
            at=chance.random() * horizon_s,
            seconds=chance.choice((0.1, 1.0, 5.0, 20.0, 60.0)) * chance.random(),
            count=int(40 * chance.random() ** 2),
            who=chance.randrange(-1, scenario.num_participants),
        )
        for _ in range(chance.choice((0, 1, 2, 3, 5, 8, 12)))
    )
    end_s = max((fault.at + fault.seconds for fault in faults), default=0.0)
    return replace(
        scenario,
        noise=noise,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        quiet_at=max(horizon_s, end_s),
    )
