"""The diagram in the docs is the transition table."""

import re
from pathlib import Path

from xain_coordinator.core.machine.evolve import TRANSITIONS
from xain_coordinator.core.vocabulary.values import Phase

PAGE = Path(__file__).parents[3] / "docs" / "state-machine.md"


def in_words(event: type) -> str:
    """The name of an event as words: RoundOpened becomes "round opened"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", event.__name__).lower()


def test_the_documented_diagram_is_the_transition_table():
    """A change of the table needs a change of the page."""
    arrows = sorted(
        f"    {before} --> {after}: {in_words(event)}"
        for (before, event), after in TRANSITIONS.items()
        if before is not after
    )
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.STANDBY}", *arrows]
    lines += [f"    {Phase.FINISHED} --> [*]", "```"]
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
