"""Decisions of a script that drives a session: how a round is made, and what its model is worth.

With `rules.scripted` a round opens once the script has configured it, and the session ends once the
script has said that it is done. What the script has said is an event. A script that is killed and
started again is told what it has decided already, and a second, different decision is refused.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """Settings and participants that a script has decided on for a round.

    config: JSON object of settings that prevail over those of [train]; "": none.
    by_site: the same by participant, which prevail over `config`.
    selected: names of the participants that take part; empty: any may.
    epochs: of the round; 0: those of the session. site_epochs: of single participants.
    """

    config: str = ""
    by_site: Mapping[str, str] = field(default_factory=dict)
    selected: tuple[str, ...] = ()
    epochs: int = 0
    site_epochs: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Participants that it names."""
        return (*self.selected, *self.by_site, *self.site_epochs)

    def of(self, participant_id: str) -> tuple[str, ...]:
        """JSON objects for a participant; a later one prevails."""
        return tuple(filter(None, (self.config, self.by_site.get(participant_id, ""))))

    def epochs_of(self, participant_id: str, epochs: int) -> int:
        """Epochs of a participant in the round. epochs: of the round."""
        return self.site_epochs.get(participant_id, epochs)

    def __str__(self) -> str:
        told = [self.config or "{}"]
        if self.epochs:
            told.append(f"epochs {self.epochs}")
        if self.by_site:
            told.append(f"by site {dict(sorted(self.by_site.items()))}")
        if self.site_epochs:
            told.append(f"epochs by site {dict(sorted(self.site_epochs.items()))}")
        if self.selected:
            told.append(f"at {', '.join(self.selected)}")
        return ", ".join(told)


NOTHING = RoundConfig()


@dataclass(frozen=True, slots=True)
class ScriptState:
    """The latest decisions of a script.

    round: the last round that it has configured, as `config` says; -1 before the first.
    model: number of the last model that it has evaluated, with these metrics; -1 before the first.
    num_samples: rows of that evaluation; 0 if they are not known.
    is_over: whether it has come to the end of its loop.
    """

    round: int = -1
    config: RoundConfig = NOTHING
    model: int = -1
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_samples: int = 0
    is_over: bool = False

    def configured(self, round_: int, config: RoundConfig) -> "ScriptState":
        """The state after the script has configured a round."""
        return dataclasses.replace(self, round=round_, config=config)

    def evaluated(
        self, model: int, metrics: Mapping[str, float], num_samples: int
    ) -> "ScriptState":
        """The state after the script has evaluated a model."""
        return dataclasses.replace(self, model=model, metrics=metrics, num_samples=num_samples)

    def ended(self) -> "ScriptState":
        """The state after the script has come to the end of its loop."""
        return dataclasses.replace(self, is_over=True)

    def config_of(self, round_: int) -> RoundConfig:
        """The configuration of a round; NOTHING unless it is the last one that was configured."""
        return self.config if self.round == round_ else NOTHING
