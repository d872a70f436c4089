"""One member of a process group that trains stages of networks: `stage_member.py RANK SIZE FILE`.

FILE: where the members find each other. Cases come as JSON lines on standard input, with "members",
the number of ranks that take part, and the options of the workload. The answers are JSON lines.
"""

import json
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.nets.neural_builders import allow_builders
from xain_workloads.nets.pipeline import Members, train_stage
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset

TIMEOUT = timedelta(seconds=120)


class Named(torch.nn.Module):
    """A network whose children run one after the other."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(num_features, 8), torch.nn.ReLU())
        self.middle = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, num_outputs)

    def forward(self, inputs: Any) -> Any:
        return self.head(self.middle(self.body(inputs)))


class Skipping(Named):
    """A network that does more than run its children one after the other."""

    def forward(self, inputs: Any) -> Any:
        hidden = self.body(inputs)
        return self.head(hidden + self.middle(hidden))


def allow_networks() -> None:
    module = ModuleType("nets")
    # The module is made here, so mypy knows no attribute of it.
    module.named, module.skipping = Named, Skipping
    sys.modules["nets"] = module
    allow_builders(["nets:*"])


def load_whole(name: str) -> Dataset:
    return load(name, task="regression" if name == "diabetes" else "classification")


def answer(case: dict[str, Any], rank: int, group: Any) -> dict[str, Any]:
    num_rows = case.get("rows_of_rank_1", 50) if rank == 1 else 50
    whole = load_whole(case.get("data", "iris"))
    data = whole.subset(range(40, 40 + num_rows))
    workload = NeuralWorkload.from_options({"mode": "pipeline", **case["options"]})
    model = workload.initial_model([whole.profile()])
    members = Members(group, torch.device("cpu"))
    try:
        made = train_stage(workload, model, data, members, epochs=2, epoch_base=1)
    except Exception as error:  # whatever it is, the test reads it
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "vector": made.vector.tolist(),
        "names": [spec.name for spec in made.layout],
        "metrics": dict(made.metrics),
    }


def refuse_pickles(*_: object) -> None:
    raise AssertionError("an object of another member would be unpickled")


def main(rank: int, size: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.distributed_c10d._tensor_to_object = refuse_pickles  # what all object collectives call
    allow_networks()
    store = dist.FileStore(file, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    groups = [dist.new_group(range(k + 1), timeout=TIMEOUT) for k in range(size)]
    for line in sys.stdin:
        case = json.loads(line)
        if rank < case["members"]:
            made = answer(case, rank, groups[case["members"] - 1])
            sys.stdout.write(json.dumps(made) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
