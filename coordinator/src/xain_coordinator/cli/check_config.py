"""Output of `xain-coordinator check-config`: the settings in force, and what follows from them."""

from collections.abc import Iterator, Mapping, Sequence

import typer

from xain_coordinator.aggregation.rules import known_rules
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.rules.pacing import plan_of
from xain_coordinator.core.view.view import told
from xain_coordinator.extensions.strategies import strategy_of_session
from xain_foundation.settings.schema import MASK, is_secret_name
from xain_foundation.settings.settings import Resolved, Setting

_VALUE_WIDTH = 24  # characters; a longer value moves the origin to the right


def show(resolved: Resolved[CoordinatorConfig]) -> None:
    """Print the settings, where each comes from, and a text about all of them."""
    typer.echo("\n".join(_setting_lines(resolved.settings())))
    typer.echo(f"\n{_derived(resolved.config)}")


def _setting_lines(settings: Sequence[Setting]) -> Iterator[str]:
    """Lines of settings: key, value and origin, aligned where the values are short."""
    width = max(len(setting.key) for setting in settings)
    yield f"{'key':{width}}  {'value':{_VALUE_WIDTH}}  from"
    for setting in settings:
        value, origin = setting.value or "(not set)", setting.where or setting.origin
        yield f"{setting.key:{width}}  {value:{_VALUE_WIDTH}}  {origin}"


def _derived(config: CoordinatorConfig) -> str:
    """Text on what follows from the settings: ports, lengths, when rounds open and close, and the
    rule."""
    rounds = config.rounds
    start = rounds.effective_start_participants
    updates = strategy_of_session(config.rules()).pacing.describe()
    first = f"The first round waits for {_participants(start)}"
    if start > rounds.num_required:
        first += (
            f", or {rounds.start_timeout_s:g} s after the first arrival, or after the request of"
            f" a fit, for {rounds.num_required}"
        )
    listens = f"Listens on {config.server.address}."
    if config.http.port is not None:
        url = config.http.url(config.http.port, is_encrypted=config.certificates is not None)
        listens += f" Serves {url}; sessions wait for POST /v1/fit."
    if config.parameters.is_on:
        listens += f" The scheduler of a parameter server listens on {config.parameters.address}."
    return (
        f"{listens}\n{first}.\n{length(config)}\n"
        f"A round needs N = {_participants(rounds.num_required, 'connected ')}, of whom"
        f" k = {rounds.num_selected} {'is' if rounds.num_selected == 1 else 'are'} selected; at"
        f" most {rounds.effective_max_participants} may be connected.\n"
        f"A model is made of {updates}; {rounds.deadline_s:g} s after the round has opened,"
        f" {rounds.min_participants} will do. After {rounds.idle_timeout_s:g} s of waiting in vain"
        f" the session ends.\n{_combined(config)}"
    )


def length(config: CoordinatorConfig) -> str:
    """A sentence on how long the training is, for as many sites as the first round waits for."""
    rules = config.rules()
    if rules.rounds == 0:
        return "It describes the data, and trains nothing."
    if rules.passes and rules.stride.step_rows:
        return (
            f"It trains for {rules.passes:,} passes over all rows, in steps of "
            f"{rules.stride.step_rows:,} rows of each site, one a round."
        )
    return f"It trains for {told(plan_of(rules, [0] * rules.start_participants), rules)}."


def _combined(config: CoordinatorConfig) -> str:
    """Sentences on the rule and the optimiser with their options, and all rules that there are."""
    rules = config.rules()
    told = f"The rule {_with(rules.aggregation, rules.aggregation_options)} combines them"
    if rules.optimizer:
        told += f", and {_with(rules.optimizer, rules.optimizer_options)} makes the step"
    return f"{told}. There are the rules {', '.join(known_rules())}."


def _with(name: str, options: Mapping[str, object]) -> str:
    """A name with its options, without secrets."""
    given = ", ".join(
        f"{option} = {MASK if is_secret_name(option) else value}"
        for option, value in options.items()
    )
    return f"{name} ({given})" if given else name


def _participants(count: int, which: str = "") -> str:
    """A number of participants in words. which: an adjective before the noun."""
    return f"{count} {which}participant{'' if count == 1 else 's'}"
