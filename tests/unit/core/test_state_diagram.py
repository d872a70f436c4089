"""The diagram in the docs is the transition table."""

from pathlib import Path

from xain_coordinator.core.session import TRANSITIONS
from xain_coordinator.core.values import Phase

PAGE = Path(__file__).parents[3] / "docs" / "state-machine.md"


def test_the_documented_diagram_is_the_transition_table():
    """Whoever changes the table changes the page."""
    arrows = sorted(f"    {a} --> {b}" for a, after in TRANSITIONS.items() for b in after)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.STANDBY}", *arrows]
    lines += [f"    {Phase.FINISHED} --> [*]", "```"]
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
