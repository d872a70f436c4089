"""Decisions of the script of a scenario. All of them follow from the seed and the number of the
round, as the constants of a script that is started again do."""

import json
from random import Random

from simulation.scenario import Scenario
from xain_wire.fl import access_pb2 as pb


def _chance(scenario: Scenario, what: str, number: int) -> Random:
    return Random(f"{scenario.seed} {what} {number}")


def names_of(scenario: Scenario) -> list[str]:
    return [f"p{index}" for index in range(scenario.num_participants)]


def configuration_of(scenario: Scenario, number: int) -> pb.ConfigureRoundRequest:
    chance, names = _chance(scenario, "configuration", number), names_of(scenario)
    request = pb.ConfigureRoundRequest(round=number)
    if chance.random() < 0.7:
        request.config = json.dumps({"lr": chance.random(), "number": number})
    if chance.random() < 0.5:
        request.epochs = chance.randint(1, 3)
    for name in names:
        if chance.random() < 0.2:
            request.by_site[name] = json.dumps({"site": name})
        if chance.random() < 0.2:
            request.site_epochs[name] = chance.randint(1, 4)
    trouble = {index for index, _ in (*scenario.gone, *scenario.bad)}
    good = [name for index, name in enumerate(names) if index not in trouble]
    if chance.random() < 0.4 and len(good) >= scenario.min_participants:
        # Enough of those that stay, or the session would wait for the others for ever.
        chosen = chance.sample(good, chance.randint(scenario.min_participants, len(good)))
        others = [name for name in names if name not in good and chance.random() < 0.5]
        request.selected.extend([*chosen, *others])
    return request


def settings_of(scenario: Scenario, number: int, participant_id: str) -> dict[str, object]:
    decided = configuration_of(scenario, number)
    settings: dict[str, object] = json.loads(decided.config or "{}")
    return settings | json.loads(decided.by_site.get(participant_id, "{}"))


def epochs_of(scenario: Scenario, number: int, participant_id: str = "") -> int:
    """The epochs of a participant in a round, or those of the round."""
    if not scenario.scripted:
        return scenario.epochs
    decided = configuration_of(scenario, number)
    return decided.site_epochs.get(participant_id) or decided.epochs or scenario.epochs


def measures(scenario: Scenario, number: int) -> bool:
    """Whether the script measures the model of this number."""
    return _chance(scenario, "measures", number).random() < 0.7


def ends_at(scenario: Scenario) -> int:
    """Number of the model at which the loop of the script ends; -1: after the last round."""
    chance = _chance(scenario, "end", 0)
    num_initial = int(scenario.initial == "first")
    first = num_initial + (0 if scenario.initial == "workload" else 1)
    last = num_initial + scenario.rounds
    # A session in which nothing was trained has failed.
    if not scenario.scripted or chance.random() < 0.7 or first + 1 >= last:
        return -1
    return chance.randint(first + 1, last - 1)
