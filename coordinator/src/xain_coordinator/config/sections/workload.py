"""The section [workload], with [workload.preprocessing]."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from xain_foundation.settings.fields import Check, Conflicts, Section, WrongSetting

if TYPE_CHECKING:
    from xain_workloads.tables.preprocessing import PreprocessingOptions
    from xain_workloads.workload import Workload


class PreprocessingSettings(Section):
    """[workload.preprocessing]"""

    scaling: Literal["", "standard", "robust", "site", "none"] = ""
    missing: Literal["", "median", "mean"] = ""
    indicate_missing: bool = False
    # None, so that a session that was opened without the key is continued without it.
    clip: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    def options(self) -> "PreprocessingOptions":
        """Options with which the initial model is made."""
        from xain_workloads.tables.preprocessing import PreprocessingOptions

        return PreprocessingOptions(self.scaling, self.missing, self.indicate_missing, self.clip)


_WITH_REMEDIES = ("sgd", "mlp", "neural")


class WorkloadSettings(Section):
    """[workload]"""

    name: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    remedy: Literal["", "proximal", "scaffold", "personal"] = ""
    proximal_mu: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    preprocessing: PreprocessingSettings = PreprocessingSettings()

    @property
    def whole_options(self) -> dict[str, Any]:
        """The options, and those of the remedy that are set, as they are written into the model."""
        remedy = {"remedy": self.remedy, "proximal_mu": self.proximal_mu}
        changed = self.changed(*remedy)
        return {**self.options, **{key: remedy[key] for key in changed}}

    @Check
    def _remedy_fits(self) -> Conflicts:
        """Check that the workload takes the remedy, and that proximal_mu comes with the remedy
        "proximal"."""
        if self.remedy and self.name not in _WITH_REMEDIES:
            yield WrongSetting(
                "remedy", f"it is for the workloads {', '.join(_WITH_REMEDIES)}; leave it out"
            )
        if self.changed("proximal_mu") and self.remedy != "proximal":
            yield WrongSetting("proximal_mu", 'only remedy = "proximal" reads it')

    @Check
    def _can_be_made(self) -> Conflicts:
        """Check that there is such a workload, and that its options are valid."""
        if self.remedy and self.name not in _WITH_REMEDIES:
            return  # told by another check
        if not self.name:
            if self.options:
                yield WrongSetting("options", "without workload.name nothing would read them")
            return
        from xain_workloads import workload

        known = workload.known_workloads()
        if self.name not in known:
            yield WrongSetting("name", f'it must be one of: {", ".join(known)}, or "" for none')
            return
        try:
            workload.create(self.name, self.whole_options)
        except ValueError as error:
            yield _wrong_option(self.options, str(error))

    @property
    def made(self) -> "Workload | None":
        """The workload with its options; None without one."""
        if not self.name:
            return None
        from xain_workloads import workload

        return workload.create(self.name, self.whole_options)

    @property
    def made_options(self) -> Any:
        """Options of the workload, with their defaults; None if there are none."""
        return getattr(self.made, "options", None)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what the workload's models are measured by; empty without a workload."""
        if (made := self.made) is None:
            return ()
        from xain_workloads.workload import metrics_of

        return metrics_of(made)

    @property
    def task(self) -> str:
        """The workload's task: "classification", "regression", or "" without a workload."""
        return str(getattr(self.made_options, "task", ""))

    @property
    def personal(self) -> tuple[str, ...]:
        """Patterns of the tensors that stay at the participants with remedy = "personal"."""
        # Settings that were made of a session have the remedy among the options.
        if self.whole_options.get("remedy") != "personal":
            return ()
        made: Any = self.made  # only a workload with remedies has them
        return tuple(made.personal)


def _wrong_option(options: Mapping[str, object], message: str) -> WrongSetting:
    """The mistake of a workload's option, under its key where the message begins with it."""
    # Such a message is "width is -1; it must be above 0". Ours begins in the same way, except that
    # it gives the key in full, and does not show the value if it might be secret.
    option, _, rest = message.partition(" ")
    if option in ("remedy", "proximal_mu") and "; " in rest:
        return WrongSetting(option, rest.partition("; ")[2])
    if option in options and "; " in rest:
        return WrongSetting(f"options.{option}", rest.partition("; ")[2])
    return WrongSetting("options", message)
