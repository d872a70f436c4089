"""Options of generalised linear models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from json import loads
from typing import Any, ClassVar, get_args

from xain_workloads.options import from_mapping, require_choice
from xain_workloads.tables.dataset import Task

NAME = "glm"
LINEAR, LOGISTIC, POISSON = "linear", "logistic", "poisson"
# The first family of each task is its default.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "classification": (LOGISTIC,),
    "regression": (LINEAR, POISSON),
}


@dataclass(frozen=True, slots=True)
class GlmOptions:
    """Options of the workload "glm".

    task: "classification" or "regression"; empty means that of the family, and without one
        "classification".
    family: "logistic", which is multinomial with more than two classes; "linear" or "poisson", with
        a logarithmic link; empty means the first of FAMILIES[task].
    reference_class: the class that the others are compared with; empty means the first one.
    references: by category column the category that the others are compared with; of the other
        columns it is the commonest.
    Raises ValueError that names the field.
    """

    # Steps at most, unless rounds are set; a fit ends by itself, mostly after six.
    rounds: ClassVar[int] = 25

    task: str = ""
    family: str = ""
    reference_class: str = ""
    references: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill in task and family, and check all options. Raises ValueError."""
        if self.family and not self.task:
            known = [task for task, names in FAMILIES.items() if self.family in names]
            object.__setattr__(self, "task", (*known, "classification")[0])
        if not self.task:
            object.__setattr__(self, "task", "classification")
        require_choice("task", self.task, get_args(Task))
        if not self.family:
            object.__setattr__(self, "family", FAMILIES[self.task][0])
        require_choice("family", self.family, FAMILIES[self.task])
        if self.reference_class and self.task == "regression":
            raise ValueError(
                f"reference_class is {self.reference_class!r}; there are no classes with task"
                " 'regression'"
            )
        for column, category in self.references.items():
            if not isinstance(category, str):
                raise ValueError(
                    f"references is {self.references!r}; the category of {column!r} must be text"
                )


def options_of_model(metadata: Mapping[str, str]) -> GlmOptions:
    """Options in the metadata of a model. Raises ValueError."""
    return from_mapping(GlmOptions, loads(metadata.get("options", "{}")), workload=NAME)
