"""Checks of an update before its round takes it.

Every refusal names the first thing that is wrong, and changes nothing: the sender may send a good
one.
"""

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.attempts import check_fit, check_slice
from xain_coordinator.core.parts.control import why_not_control
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary.keys import base_key_of, round_of
from xain_coordinator.core.vocabulary.values import BYTES, GlobalModel, Layout, Rules, Update
from xain_workloads.model import control_size, size_of

_DTYPES = ("float16", "float32", "float64")


def require_uncounted(session: Session, participant_id: str, key: str) -> None:
    """Refuse an upload under a name that is another participant's, or that counts already as the
    update of another one: a key does not have to name its sender. Raises UPLOAD_NAME_TAKEN."""
    base_key = base_key_of(key)
    name = base_key.partition("/")[2]
    if name == participant_id:
        return
    if name in session.members:
        raise errors.Refusal(
            errors.Reason.UPLOAD_NAME_TAKEN,
            f"the upload {base_key!r} is that of participant {name!r}",
        )
    for known in (session.open_round, session.last_round):
        for update in () if known is None else known.updates.values():
            other = update.weights.ref.key
            if other.startswith(base_key) and base_key_of(other) == base_key:
                raise errors.Refusal(
                    errors.Reason.UPLOAD_NAME_TAKEN, f"the upload {base_key!r} counts already"
                )
    if base_key in session.buffered.named.get(round_of(base_key), ()):
        raise errors.Refusal(
            errors.Reason.UPLOAD_NAME_TAKEN, f"the upload {base_key!r} counts already"
        )


def check_update(model: GlobalModel, round_: Round, update: Update, rules: Rules) -> None:
    """Refuse an update that cannot be aggregated, naming the first fault. Raises InvalidUpdate, and
    SLICE_MISMATCH for a slice that is good by itself."""
    weights = update.weights
    if update.num_samples < 0:
        raise errors.InvalidUpdate(
            f"the number of samples must not be negative, got {update.num_samples}"
        )
    shape, dtype = _expected(model, round_)
    if round_.attempt:
        check_slice(model, update)
        shape = weights.shape
    if shape is None:
        if len(weights.shape) != 1 or weights.shape[0] == 0:
            raise errors.InvalidUpdate(
                f"the first weights must be a flat vector with elements, got shape {weights.shape}"
            )
        if weights.dtype not in _DTYPES:
            raise errors.InvalidUpdate(
                f"weights must be float16, float32 or float64, got {weights.dtype}"
            )
    elif dtype == BYTES and weights.dtype == BYTES:
        if len(weights.shape) != 1 or weights.shape[0] == 0:
            raise errors.InvalidUpdate(
                f"the update must be a flat vector of bytes, got shape {weights.shape}"
            )
    elif weights.shape != shape:
        raise errors.InvalidUpdate(
            f"the weights have shape {weights.shape}, the global model {shape}"
        )
    elif weights.dtype != dtype:
        raise errors.InvalidUpdate(f"the weights are {weights.dtype}, the global model is {dtype}")
    if not round_.attempt:
        _check_layout(update, rules)
    if weights.first_bad is not None:
        layout = update.layout if round_.attempt else model.layout
        raise errors.InvalidUpdate(
            f"the weights are not finite, first at {_element_text(layout, weights.first_bad)}; "
            "train with a smaller learning rate"
        )
    if round_.attempt:
        check_fit(model, round_, update)


def _check_layout(update: Update, rules: Rules) -> None:
    """Check that the layout that comes with initial weights, if one does, describes them. Raises
    InvalidUpdate."""
    if not update.layout:
        return
    names: set[str] = set()
    for spec in update.layout:
        if not spec.name or spec.name in names:
            raise errors.InvalidUpdate(
                f"the layout needs a name of its own for each tensor, and has {spec.name!r} "
                f"{'twice' if spec.name else 'for one'}"
            )
        names.add(spec.name)
        if min(spec.shape, default=0) < 0:
            raise errors.InvalidUpdate(f"the layout gives {spec.name!r} the shape {spec.shape}")
        if spec.dtype not in _DTYPES:
            raise errors.InvalidUpdate(
                f"the layout gives {spec.name!r} the dtype {spec.dtype!r}; it must be one of: "
                f"{', '.join(_DTYPES)}"
            )
    if any(spec.kind == "control" for spec in update.layout[:-1]):
        raise errors.InvalidUpdate("the layout has a control variate that is not its last tensor")
    size = size_of(update.layout)
    if control_size(update.layout):
        if 2 * control_size(update.layout) != size:
            raise errors.InvalidUpdate(
                f"the control variate has {control_size(update.layout)} elements, and all other "
                f"tensors together {size - control_size(update.layout)}; it needs as many"
            )
        if why := why_not_control(rules):
            raise errors.InvalidUpdate(f"the model has a control variate, and {why}")
    if update.weights.shape != (size,):
        raise errors.InvalidUpdate(
            f"the layout describes {size} elements, the weights have shape {update.weights.shape}"
        )


def _element_text(layout: Layout, index: int) -> str:
    """An element of the flat vector for a message: by its array and index, where the layout
    tells."""
    text = f"index {index}"
    first = 0
    for spec in layout:
        if index < first + spec.size:
            at, position = index - first, []
            for extent in reversed(spec.shape):
                at, rest = divmod(at, extent)
                position.append(rest)
            where = ", ".join(str(each) for each in reversed(position))
            return f"{text}, which is {spec.name}[{where}]"
        first += spec.size
    return text


def _expected(model: GlobalModel, round_: Round) -> tuple[tuple[int, ...] | None, str]:
    """Shape and dtype that updates must have. In an initialisation round the first accepted one
    says; before it, (None, "")."""
    if not model.is_empty:
        return model.shape, model.dtype
    first = next(iter(round_.updates.values()), None)
    return (None, "") if first is None else (first.weights.shape, first.weights.dtype)
