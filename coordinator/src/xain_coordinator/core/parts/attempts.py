"""Attempts at a round of the rule "assemble": model parallelism.

The selected participants of such a round form a process group, in which each trains one stage of
the model. Their order in the selection gives the ranks. Each hands in the slice of the flat vector
that its stage owns, and the slices put together are the next model.

An attempt breaks when a member leaves, fails, reports that the group broke, or hands in a slice
that does not fit the others. The round then starts again at once with the next attempt, from the
same global model, with the connected participants. The other members learn the number of the new
attempt, and stop training in the old one, whose slices are dropped. A member that has died is
selected until its lease ends, which breaks the last attempt that it is in. The session finishes
when the last attempt that a round may have breaks.
"""

from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Reason, Refusal, invalid_request
from xain_coordinator.core.vocabulary.values import GlobalModel, Layout, Rules, Update
from xain_foundation.names import shortened
from xain_workloads.model import size_of

RULE = "assemble"

# Attempts at a round. When the last of them breaks, the session is finished.
MAX_ATTEMPTS = 10

MAX_ADDRESS = 255  # characters of HOST:PORT, about as long as a DNS name may be


def max_stages(rules: Rules, model: GlobalModel) -> int:
    """The number of stages that the model is cut into, at most. Tensors whose names begin alike, up
    to the first dot, are those of one layer, which is not cut."""
    num_layers = len({spec.name.partition(".")[0] for spec in model.layout}) or 1
    return min(int(rules.aggregation_options.get("stages", 0)) or num_layers, num_layers)


def check_address(address: str) -> None:
    """Check that an address is HOST:PORT: all members receive it from the journal. Raises
    INVALID_REQUEST."""
    host, _, port = address.rpartition(":")
    is_host = bool(host) and host.isascii() and host.isprintable() and " " not in host
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535
    if len(address) > MAX_ADDRESS or not is_host or not is_port:
        raise invalid_request(
            f"the address for process groups must be HOST:PORT with at most {MAX_ADDRESS} "
            f"printable characters and a port from 1 to 65535, got {shortened(address)!r}"
        )


def slice_of(model: Layout, owned: Layout) -> tuple[int, int]:
    """Start and stop of tensors in the flat vector of a model. owned: consecutive tensors of the
    model. Raises InvalidUpdate."""
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


def check_slice(model: GlobalModel, update: Update) -> None:
    """Refuse a slice that is no part of the model. Raises InvalidUpdate."""
    start, stop = slice_of(model.layout, update.layout)
    if update.weights.shape != (stop - start,):
        raise InvalidUpdate(
            f"the slice has shape {update.weights.shape}, its tensors have {stop - start} elements"
        )


def check_fit(model: GlobalModel, round_: Round, update: Update) -> None:
    """Refuse a slice that overlaps another one of the attempt, or the last slice of an attempt if a
    part of the model is missing then. Raises SLICE_MISMATCH."""
    start, stop = slice_of(model.layout, update.layout)
    taken = [(slice_of(model.layout, u.layout), p) for p, u in round_.updates.items()]
    for (first, end), owner in taken:
        if first < stop and start < end:
            raise Refusal(
                Reason.SLICE_MISMATCH,
                f"the slice [{start}, {stop}) overlaps [{first}, {end}), the slice of {owner}",
            )
    is_last = round_.outstanding == (update.participant_id,)
    size = stop - start + sum(end - first for (first, end), _ in taken)
    if is_last and not round_.broken and size != model.shape[0]:
        raise Refusal(
            Reason.SLICE_MISMATCH,
            f"the slices of the {len(round_.selected)} participants have {size} of the "
            f"{model.shape[0]} elements of the model",
        )


def why_broken(round_: Round) -> str:
    """Why the present attempt is over: the first member that stopped, and its reason, or the
    deadline."""
    for participant_id, reason in round_.broken.items():
        return f"{participant_id}: {reason}"
    return "its deadline has passed"


def why_given_up(round_: Round) -> str:
    """Why a round has no further attempt, with the participant to look at first."""
    why = f"round {round_.number} was given up after {round_.attempt} attempts"
    first = round_.first_to_stop
    if first:
        name = max(sorted(first), key=lambda participant_id: first[participant_id])
        why += f"; the first to stop was {name} in {first[name]} of them"
    return f"{why}; the last one: {why_broken(round_)}"
