"""Model parallelism: train one stage of a network as a member of a process group.

Every member holds the same rows. The network is a sequence of layers, which is cut into stages;
member r of the group trains stage r. A batch is divided into micro-batches. Their activations
travel from stage to stage, and the gradients of activations travel back, by the schedules of
torch.distributed.pipelining. Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019,
"PipeDream", whose schedule is 1F1B.

Rows that fill up the last micro-batches of a batch have no part in the loss, so a step is the one
that a single process takes on the same batch.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import import_module
from json import dumps, loads
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError, Diverged
from xain_workloads.model import Layout, Model, Vector
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.nets.neural_modules import (
    ROWS_AT_A_TIME,
    Network,
    import_torch,
    loss_of,
    optimizer_of,
    seeded,
    vector_of,
)
from xain_workloads.supervised import DIVERGED_SCORE, require_training
from xain_workloads.tables.cuts import balanced_cuts, require_weights, stages_of
from xain_workloads.tables.dataset import Dataset

_NUM_MEASUREMENTS = 3  # of the seconds of a layer; the least counts


@dataclass(frozen=True, slots=True, eq=False)
class StageResult:
    """Result of a member of the group.

    vector: the tensors of its stage. layout: of that vector, consecutive tensors of the model.
    num_samples: rows of the data. metrics: of the whole network on all rows, after training.
    """

    vector: Vector
    layout: Layout
    num_samples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Members:
    """The process group as its members use it. device: of the stages; a GPU if all have one."""

    group: Any
    device: Any

    @property
    def rank(self) -> int:
        return int(_distributed().get_rank(self.group))

    @property
    def size(self) -> int:
        return int(_distributed().get_world_size(self.group))

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def gather(self, value: Any) -> list[Any]:
        """The values of all members, which JSON can write, in the order of ranks.

        As tensors: the object collectives of torch would unpickle what comes from the network.
        """
        torch, text = import_torch(), dumps(value).encode()
        if self.size == 1:
            return [loads(text)]
        sizes = self._gather(torch.tensor([len(text)], device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=self.device)
        return [loads(bytes(one.cpu().numpy())) for one in self._gather(padded)]

    def _gather(self, tensor: Any) -> list[Any]:
        tensors = [import_torch().empty_like(tensor) for _ in range(self.size)]
        _distributed().all_gather(tensors, tensor, group=self.group)
        return tensors


def train_stage(
    workload: NeuralWorkload,
    model: Model,
    data: Dataset,
    members: Members,
    *,
    epochs: int,
    epoch_base: int,
) -> StageResult:
    """Train this member's stage for some epochs. All members call it with the same arguments.

    Batches are drawn from the seed in the options, so that all members draw the same.
    Raises DataError if the data do not fit, or are not those of the other members, or if
    the network cannot be cut; Diverged; and what torch.distributed raises if the group breaks.
    """
    options = workload.options
    require_training(epochs, epoch_base, options.seed)
    codes, target, scale = workload.targets_of(model, data)
    _require_same_rows(members, data)
    whole = NeuralWorkload(replace(options, device="cpu")).network(model)
    rows_of_batch = max(map(len, workload.batches(len(target), (options.seed, 0))[0]))
    num_parts = options.micro_batches
    if options.schedule == "1f1b":
        num_parts = max(num_parts, members.size)  # as the schedule needs
    layers = _layers_of(whole, model.layout, whole.inputs(data.features[:2]))
    sample = whole.inputs(data.features[: -(-rows_of_batch // num_parts)])
    cuts = _cuts(workload, layers, sample, members)
    own = stages_of(cuts, len(layers))[members.rank]
    rows_between = _rows_between(whole, layers, whole.inputs(data.features[:1]))
    ends = rows_between[own.start], rows_between[own.stop]
    own_layers = layers[own]
    layout = tuple(spec for layer in own_layers for spec in layer.layout)
    module = import_torch().nn.Sequential(
        OrderedDict((layer.name, layer.module) for layer in own_layers)
    )
    stage = replace(whole, module=module.to(members.device), device=members.device)
    pipe = _Pipe(stage, members, num_parts, options.schedule, ends)
    try:
        optimizer = optimizer_of(module, options)
        weights = workload.row_weights(model, codes)
        take_step = pipe.steps(optimizer, data.features, (target, weights), rows_of_batch)
        for epoch in range(epoch_base, epoch_base + epochs):
            batches, torch_seed = workload.batches(len(target), (options.seed, epoch))
            with seeded((torch_seed + members.rank) % 2**63):  # dropout differs between stages
                for rows in batches:
                    take_step(rows)
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise DataError("batch normalisation needs micro-batches of two rows or more") from error
    vector = vector_of(module, layout)
    scores = pipe.scores(data.features)
    metrics = {} if scores is None else workload.metrics_of(scores, codes, scale)
    is_good = bool(np.isfinite(vector).all())
    if scores is not None:
        is_good = is_good and bool(np.abs(scores).max() < DIVERGED_SCORE)
    told = members.gather((is_good, metrics))
    if not all(good for good, _ in told):
        raise Diverged(
            f"training diverged in epochs {epoch_base + 1} to {epoch_base + epochs} with"
            f" learning_rate = {options.learning_rate:g}: lower learning_rate, or scale the data"
        )
    return StageResult(vector, layout, data.num_samples, told[-1][1])


def _require_same_rows(members: Members, data: Dataset) -> None:
    """Raise DataError at all members unless they hold the same rows in the same order."""
    digest = blake2b(digest_size=16)
    digest.update(repr((data.features.shape, data.feature_names)).encode())
    digest.update(np.ascontiguousarray(data.features).data)
    digest.update("\n".join(map(str, data.target.tolist())).encode())
    told = members.gather((data.num_samples, digest.hexdigest()))
    if any(one != told[0] for one in told):
        counts = ", ".join(f"rank {rank} has {rows}" for rank, (rows, _) in enumerate(told))
        raise DataError(
            "the participants that train one network together must hold the same rows in the same"
            f" order: {counts} rows, and they are not the same; give all of them the same file,"
            " without a partition"
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """A child of the network. layout: of its tensors that travel."""

    name: str
    module: Any
    layout: Layout


def _layers_of(network: Network, layout: Layout, inputs: Any) -> list[_Layer]:
    """List the children of the network, which it must run one after the other.

    inputs: rows to try that with. Raises DataError if it does something else, or if layers share
    tensors.
    """
    torch = import_torch()
    children = list(network.module.named_children())
    if not isinstance(network.module, torch.nn.Sequential):
        # Switches dropout and batch normalisation to evaluation mode; runs no text as code.
        network.module.train(False)
        with torch.no_grad():
            try:
                outputs = inputs
                for _, child in children:
                    outputs = child(outputs)
                is_sequence = bool(torch.equal(outputs, network.module(inputs)))
            except (RuntimeError, TypeError, ValueError):
                is_sequence = False
        if not is_sequence:
            raise DataError(
                f"{type(network.module).__name__} does not run its children"
                f" {[name for name, _ in children]} one after the other, so it cannot be cut into"
                " stages; let the builder return a torch.nn.Sequential"
            )
    layers = [
        _Layer(name, child, tuple(s for s in layout if s.name.startswith(f"{name}.")))
        for name, child in children
    ]
    tensors = [id(weight) for layer in layers for weight in layer.module.parameters()]
    if len({*tensors}) < len(tensors):
        raise DataError("layers of the network share weights, so it cannot be cut into stages")
    if sum(len(layer.layout) for layer in layers) < len(layout):
        raise DataError("the network has weights outside of its layers, so it cannot be cut")
    return layers


def _cuts(
    workload: NeuralWorkload, layers: Sequence[_Layer], sample: Any, members: Members
) -> tuple[int, ...]:
    """Choose the cuts: those by hand, where they make as many stages as there are members; else
    balanced by the seconds that the member of rank 0 measures, so that all members cut alike."""
    has_weights = [bool(layer.layout) for layer in layers]
    by_hand = workload.options.cuts
    if members.size == 1:
        return ()
    if len(by_hand) + 1 == members.size:
        if by_hand[-1] >= len(layers):
            raise DataError(f"cuts is {by_hand}; there are {len(layers)} layers, counted from 0")
        require_weights(by_hand, has_weights)
        return by_hand
    costs = members.gather(_measure_layers(layers, sample) if members.rank == 0 else [])[0]
    return balanced_cuts(costs, has_weights, members.size)


def _measure_layers(layers: Sequence[_Layer], sample: Any) -> list[float]:
    """Measure the seconds that each layer takes forward and backward on some rows."""
    costs, inputs = [], sample
    with seeded(0):  # dropout draws numbers
        for number, layer in enumerate(layers):
            module = deepcopy(layer.module).train()
            seconds = []
            for _ in range(_NUM_MEASUREMENTS):
                given = inputs.detach().requires_grad_(number > 0)
                began = time.perf_counter()
                outputs = module(given)
                if outputs.requires_grad:
                    outputs.sum().backward()
                seconds.append(time.perf_counter() - began)
            costs.append(min(seconds))
            inputs = outputs
    return costs


def _rows_between(network: Network, layers: Sequence[_Layer], row: Any) -> list[Any]:
    """One row as it goes into each layer, and the output. Members learn from it the shapes of the
    tensors that they receive; otherwise torch would send shapes as pickles."""
    # Switches dropout and batch normalisation to evaluation mode; runs no text as code.
    network.module.train(False)
    rows = [row]
    with import_torch().no_grad():
        for layer in layers:
            rows.append(layer.module(rows[-1]))
    return rows


@dataclass(slots=True)
class _Pipe:
    """A stage, and the schedule by which its micro-batches go through the group.

    stage: its module is this member's part of the network. num_parts: micro-batches of a batch.
    ends: a row as it goes into the stage, and as it comes out.
    """

    stage: Network
    members: Members
    num_parts: int
    schedule: str
    ends: tuple[Any, Any]

    def steps(
        self,
        optimizer: Any,
        features: NDArray[np.float64],
        target_and_weights: tuple[NDArray[Any], NDArray[np.float64] | None],
        rows_of_batch: int,
    ) -> Callable[[NDArray[np.intp]], None]:
        """Make the function that takes a training step on some rows, at most `rows_of_batch`."""
        target, weights = target_and_weights
        inputs, targets = self.stage.inputs(features), self.stage.targets(target)
        of_rows = None if weights is None else self.stage.targets(weights)
        self.stage.module.train()
        pipelining = import_module("torch.distributed.pipelining")
        num_rows = 0

        def loss(outputs: Any, rows: Any) -> Any:
            """The share of a micro-batch in the batch's mean loss. rows: -1 behind the last."""
            self._require_outputs(outputs)
            known = rows[rows >= 0]
            if not len(known):
                return 0 * outputs.sum()
            of_known = None if of_rows is None else of_rows[known]
            mean = loss_of(outputs[: len(known)], targets[known], of_known)
            return mean * (len(known) / num_rows)

        kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
        schedule = kinds[self.schedule](
            self._torch_stage(rows_of_batch), self.num_parts, loss_fn=loss, scale_grads=False
        )
        width = self._padded(rows_of_batch)

        def take_step(rows: NDArray[np.intp]) -> None:
            nonlocal num_rows
            num_rows = len(rows)
            optimizer.zero_grad()
            self._step(schedule, inputs, rows, width, with_target=True)
            optimizer.step()

        return take_step

    def scores(self, features: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Send rows through all stages in evaluation mode: (n, num_outputs) at the last; or
        None."""
        torch = import_torch()
        pipelining = import_module("torch.distributed.pipelining")
        # Switches dropout and batch normalisation to evaluation mode; runs no text as code.
        self.stage.module.train(False)
        inputs = self.stage.inputs(features)
        rows_of_batch = min(len(features), ROWS_AT_A_TIME)
        width = self._padded(rows_of_batch)
        schedule = pipelining.ScheduleGPipe(self._torch_stage(rows_of_batch), self.num_parts)
        parts = []
        with torch.no_grad():
            for start in range(0, len(features), width):
                rows = np.arange(start, min(start + width, len(features)))
                outputs = self._step(schedule, inputs, rows, width, with_target=False)
                if self.members.is_last:
                    parts.append(outputs[: len(rows)].cpu().double().numpy())
        return np.concatenate(parts) if parts else None

    def _step(
        self, schedule: Any, inputs: Any, rows: NDArray[np.intp], width: int, *, with_target: bool
    ) -> Any:
        """Send a batch through the pipeline, filled up to `width` rows with copies of a row."""
        torch = import_torch()
        num_more = width - len(rows)
        batch: tuple[Any, ...] = ()
        target = None
        if self.members.rank == 0:
            batch = (inputs[np.append(rows, np.full(num_more, rows[0]))],)
        if self.members.is_last and with_target:
            filled = np.append(rows, np.full(num_more, -1))
            target = torch.as_tensor(filled, device=self.members.device)
        return schedule.step(*batch, target=target, return_outputs=not with_target)

    def _torch_stage(self, rows_of_batch: int) -> Any:
        """This member's stage as PyTorch's pipelining takes it."""
        torch = import_torch()
        pipelining = import_module("torch.distributed.pipelining")
        members, num_rows = self.members, self._padded(rows_of_batch) // self.num_parts
        inputs, outputs = (
            torch.empty(
                (num_rows, *row.shape[1:]),
                dtype=row.dtype,
                device=members.device,
                requires_grad=row is self.ends[1] or members.rank > 0,
            )
            for row in self.ends
        )
        return pipelining.PipelineStage(
            self.stage.module,
            members.rank,
            members.size,
            members.device,
            input_args=inputs,
            output_args=outputs,
            group=members.group,
        )

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // self.num_parts) * self.num_parts

    def _require_outputs(self, outputs: Any) -> None:
        expected = self.stage.num_outputs
        if outputs.ndim != 2 or outputs.shape[1] != expected:
            raise DataError(
                f"the network gives outputs of shape {tuple(outputs.shape)}; it must give"
                f" (n, {expected})"
            )


def _distributed() -> Any:
    return import_module("torch.distributed")
