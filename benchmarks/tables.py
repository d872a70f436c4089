"""Put the figures of bench-results/ into docs/performance.md.

    python benchmarks/tables.py [PAGE]

Between <!-- NAME: KEY, KEY --> and <!-- end --> on the page come the figures of these keys of
bench-results/NAME.json, and a line with the machine, the versions and the date; without keys, all
of them. What there are no figures for stays as it is, and so does what there are only figures of a
--quick run for. Prints which parts were renewed.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import results

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
PART = re.compile(
    r"(?P<begin><!-- (?P<name>\w+)(?:: (?P<keys>[\w, ]+))? -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def rendered(figures: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Lines as one table of two columns, tables as they are."""
    about = figures["about"]
    chosen = keys or [key for key in figures if key != "about"]
    lines = [key for key in chosen if key in figures and not results.is_table(figures[key])]
    parts = []
    if lines:
        parts.append(table([{"figure": said(key), "": figures[key]} for key in lines]))
    parts += [table(figures[key]) for key in chosen if results.is_table(figures.get(key))]
    packages = ", ".join(f"{name} {about[name]}" for name in results.PACKAGES if about.get(name))
    parts.append(
        f"{about['date']}: {about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, "
        f"{about['system']}; {beside(about)}; "
        f"Python {about['python']}, {packages}, revision {about['revision']}."
    )
    return "\n\n".join(parts)


def beside(about: Mapping[str, Any]) -> str:
    """The load of other programs on the machine, by a sample taken before the start."""
    busy = about["busy_cores"]
    told = (
        f"other programs used {results.shown(busy)} of {about['cores']} cores before the start"
        f" (load average {results.shown(about['load_before'])})"
    )
    is_loaded = isinstance(busy, float) and busy > results.QUIET_CORES
    return f"**made beside other work: {told}**" if is_loaded else told


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = results.columns(rows)
    lines = [[said(name) for name in names], ["---", *["---:"] * (len(names) - 1)]]
    lines += [[results.shown(row.get(name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def said(key: str) -> str:
    """A key as a heading: units as they are written."""
    words = key.replace("_per_s", "/s").replace("_gb/s", " GB/s").replace("_mb/s", " MB/s")
    words = re.sub(r"^gb/s", "GB/s", words).replace("_mb", " MB").replace("_ms", " ms")
    return re.sub(r"_s(?=_|$)", " (s)", words).replace("_", " ")


def renewed(page: str, folder: Path) -> tuple[str, list[str]]:
    """The page, and which parts of it are new."""
    names = []

    def fill(part: re.Match[str]) -> str:
        source = folder / f"{part['name']}.json"
        if not source.exists():
            return part[0]
        keys = [key.strip() for key in (part["keys"] or "").split(",") if key.strip()]
        figures = json.loads(source.read_text(encoding="utf-8"))
        if keys and not figures.keys() & set(keys):
            return part[0]
        # Figures without the sample of the load are from before it was taken.
        if figures["about"].get("quick") or "busy_cores" not in figures["about"]:
            return part[0]
        names.append(part["name"])
        return f"{part['begin']}\n{rendered(figures, keys)}\n\n{part['end']}"

    return PART.sub(fill, page), names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    given = parser.parse_args()
    page, names = renewed(given.page.read_text(encoding="utf-8"), given.results)
    given.page.write_text(page, encoding="utf-8")
    print(f"renewed: {', '.join(names) or 'nothing, there are no figures'}")


if __name__ == "__main__":
    main()
