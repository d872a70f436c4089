"""The correction of a script's local steps by the control variates of SCAFFOLD."""

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from xain_participant.keep.variates import KeptVariates
from xain_workloads.model import CONTROL_LOST, Model
from xain_workloads.scaffold import without_control


class Correction:
    """The correction in one round. model: with the server's control variate.

    vector: (d,), to be added to the gradient of each step, in the model's dtype.
    path: how far the steps of optimisers would have led down a constant gradient of 1.
    """

    def __init__(self, kept: KeptVariates, model: Model) -> None:
        self._kept = kept
        self._variates = kept.begin(model)
        self._model = without_control(model)
        # Copied, since the memory of the weights is the script's.
        self._start = Model(self._model.vector.copy(), self._model.layout)
        self.vector = self._variates.correction.astype(model.vector.dtype)
        self.path = 0.0
        self._hooks: list[Any] = []

    def apply(self, optimizer: Any, corrections: Iterable[tuple[Any, Any]]) -> None:
        """Correct the gradients in each step of a torch optimiser from now on.

        corrections: pairs of a parameter and what is added to its gradient.
        Raises TypeError for an optimiser whose steps do not follow the gradient.
        """
        groups = [group for group in optimizer.param_groups if "lr" in group]
        if type(optimizer).__name__ != "SGD" or any(group["dampening"] for group in groups):
            raise TypeError(
                f"round.correct() needs torch.optim.SGD without dampening, not {optimizer!r}"
            )
        pairs = list(corrections)
        rates = {(group["lr"], group["momentum"], group["nesterov"]) for group in groups}
        if len(rates) > 1:
            raise TypeError("round.correct() needs the same lr and momentum for all parameters")
        velocity = 0.0

        def before(stepped: Any, *_: object) -> None:
            """Add the corrections to the gradients, and count the path, before a step is taken."""
            nonlocal velocity
            group = stepped.param_groups[0]
            momentum = group["momentum"]
            velocity = momentum * velocity + 1.0
            self.path += group["lr"] * (1 + momentum * velocity if group["nesterov"] else velocity)
            for parameter, added in pairs:
                if parameter.grad is None:
                    parameter.grad = added.clone()
                else:
                    parameter.grad.add_(added)

        self._hooks.append(optimizer.register_step_pre_hook(before))

    def finish(
        self, trained: NDArray[Any], path: float | None
    ) -> tuple[NDArray[Any], dict[str, float]]:
        """Keep the participant's control variate and stop correcting steps. Returns the update, (2
        d,), with a metric if the variate of before was lost.

        trained: (d,). path: of steps that the script took itself. Raises ValueError without one.
        """
        path = self.path if path is None else float(path)
        if not path > 0:
            raise ValueError(
                "the model of this session has a control variate: call round.correct(model,"
                " optimizer) before training, or give round.submit() the sum of all learning rates"
                f" as path, which is {path:g}"
            )
        for hook in self._hooks:  # an optimiser may go on into the next round
            hook.remove()
        update, own = self._variates.after(self._start, trained, path)
        self._kept.keep(own)
        return update, {CONTROL_LOST: 1.0} if self._kept.is_lost else {}
