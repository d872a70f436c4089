"""The demo: a coordinator and its participants as real processes on this machine, training one
model on data that is split between them.

The participants are started by their program's name; nothing is imported from them.
"""

from collections.abc import Sequence

from xain_coordinator.cli.demo.cli import main as _main

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the demo with these command-line arguments; returns its exit status."""
    return _main(arguments)
