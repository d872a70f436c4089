"""Control variates of SCAFFOLD: which sites' variates the server's is the mean of.

Each site has a variate of its own, and the last tensor of a model, of the kind "control", is the
mean of those of all sites by rows. An update of a site changes both. The site keeps a version of
its variate for each round that it has trained for, and is told in which round its update counted
last, so that it goes on from the version that is a part of the mean.

Where that version is lost, or its site stays away, nothing tells what it adds to the mean. Then the
rounds are forgotten, and all sites begin anew with the server's variate, of which it is the mean.
Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning".
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary.values import GlobalModel, Rules
from xain_workloads.model import control_size

# Rounds for which a site that has left may come back to its variate.
MAX_ROUNDS_AWAY = 10


@dataclass(frozen=True, slots=True)
class Counted:
    """The last update of a site that counted since the variates began. num_samples: n_k."""

    round: int
    num_samples: int


def has_control(model: GlobalModel | None) -> bool:
    """Whether a model has a control variate, which its updates change."""
    if model is None or model.is_empty or not model.layout:
        return False
    return control_size(model.layout) > 0


def share_of(round_: Round, counted: Mapping[str, Counted]) -> float:
    """The share of a round's sites in the mean of all control variates, by rows; by number of sites
    if none has rows. counted: sites that counted before the round."""
    others = [one.num_samples for name, one in counted.items() if name not in round_.updates]
    ours = [update.num_samples for update in round_.updates.values()]
    if not any(ours + others):  # all weigh the same
        return len(ours) / (len(ours) + len(others))
    return sum(ours) / (sum(ours) + sum(others))


def counted_after(
    round_: Round, counted: Mapping[str, Counted], members: Container[str]
) -> Mapping[str, Counted]:
    """The sites whose control variates the server's is the mean of, once the model of a round is
    published; empty, so that all begin anew, if a variate was lost or a site is away for too
    long."""
    new = {p: Counted(round_.number, u.num_samples) for p, u in round_.updates.items()}
    after = {**counted, **new}
    is_away = any(
        name not in members and round_.number - one.round >= MAX_ROUNDS_AWAY
        for name, one in after.items()
    )
    return {} if round_.lost_control or is_away else after


def why_not_control(rules: Rules) -> str:
    """Why a session with these rules cannot train a model with a control variate; "": it can."""
    if rules.aggregation != "weighted_average":
        return f'aggregation.rule = "{rules.aggregation}" makes no mean of control variates by rows'
    if rules.carries_over:
        return "updates of earlier rounds would change a control variate that others have changed"
    return ""
