"""Attempts at a round of the rule "assemble": model parallelism.

The selected participants of such a round form a process group, in which each trains one stage of
the model. Their order in the selection gives the ranks. Each hands in the slice of the flat vector
that its stage owns, and the slices put together are the next model.

A group is as good as its weakest member. Once a member has left, failed, or reported that the group
broke, the attempt is broken, and the round starts again at once with another attempt, from the same
global model, with the participants that are there. The other members hear of the new attempt, and
stop what they do for the old one, whose slices are dropped. A member that has died without a word
is in the attempts until the end of its lease, which ends the last of these.
"""

from xain_coordinator.core.errors import InvalidUpdate
from xain_coordinator.core.values import GlobalModel, Layout, Round, Rules, Update
from xain_workloads.model import size_of

RULE = "assemble"


def max_stages(rules: Rules, model: GlobalModel) -> int:
    """The number of stages that the model is cut into, at most.

    Tensors whose names begin alike, up to the first dot, are those of one layer, which is not cut.
    """
    num_layers = len({spec.name.partition(".")[0] for spec in model.layout}) or 1
    return min(int(rules.aggregation_options.get("stages", 0)) or num_layers, num_layers)


def is_whole(round_: Round) -> bool:
    """Whether all slices of the attempt are in."""
    return bool(round_.selected) and not round_.broken and round_.all_in


def slice_of(model: Layout, owned: Layout) -> tuple[int, int]:
    """Start and stop of tensors in the flat vector of a model.

    owned: consecutive tensors of the model. Raises InvalidUpdate.
    """
    if not owned:
        raise InvalidUpdate("the update does not say which tensors of the model it holds")
    names = [spec.name for spec in model]
    first = owned[0].name
    if first not in names:
        raise InvalidUpdate(f"the update has the tensor {first!r}, which the model has not")
    at = names.index(first)
    for mine, own in zip(owned, model[at:], strict=False):
        if (mine.name, mine.shape) != (own.name, own.shape):
            raise InvalidUpdate(
                f"the update has the tensor {mine.name!r} of shape {mine.shape} where the model "
                f"has {own.name!r} of shape {own.shape}"
            )
    if len(owned) > len(model) - at:
        raise InvalidUpdate(f"the update has more tensors than follow {first!r} in the model")
    start = size_of(model[:at])
    return start, start + size_of(owned)


def check_slice(model: GlobalModel, round_: Round, update: Update) -> None:
    """Refuse a slice that overlaps another one of the attempt, or the last slice of an attempt if a
    part of the model is missing then.

    Raises InvalidUpdate.
    """
    start, stop = slice_of(model.layout, update.layout)
    if update.weights.shape != (stop - start,):
        raise InvalidUpdate(
            f"the slice has shape {update.weights.shape}, its tensors have {stop - start} elements"
        )
    taken = [(slice_of(model.layout, u.layout), p) for p, u in round_.updates.items()]
    for (first, end), owner in taken:
        if first < stop and start < end:
            raise InvalidUpdate(
                f"the slice [{start}, {stop}) overlaps [{first}, {end}), the slice of {owner}"
            )
    is_last = round_.outstanding == (update.participant_id,)
    size = stop - start + sum(end - first for (first, end), _ in taken)
    if is_last and not round_.broken and size != model.shape[0]:
        raise InvalidUpdate(
            f"the slices of the {len(round_.selected)} participants have {size} of the "
            f"{model.shape[0]} elements of the model"
        )
