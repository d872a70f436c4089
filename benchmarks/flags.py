"""Flags of all benchmarks."""

import argparse


def parser(
    about: str | None, quick: str = "tiny sizes, to see that it works"
) -> argparse.ArgumentParser:
    """about: the script's docstring, shown by --help. quick: what --quick means here."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=f"{quick}; its figures go into no table")
    made.add_argument(
        "--any-load",
        action="store_true",
        help="measure although other programs use the cores; the tables then say so",
    )
    return made


def numbers(text: str) -> list[int]:
    """Several in one flag, as in 4,8,16."""
    return [int(part) for part in text.split(",")]
