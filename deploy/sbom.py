"""List what an installation consists of, as CycloneDX 1.6 in JSON: `python deploy/sbom.py`, or
`make sbom`.

    python deploy/sbom.py [LOCK ...] > sbom.json

Every package of the given locks, with its version, its hashes and its package URL; by default those
of the coordinator's and of the participant's installation. Source of the form:
https://cyclonedx.org/docs/1.6/json/
"""

# ruff: noqa: T201 - a script speaks by printing

import hashlib
import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCKS = ("locks/requirements-coordinator.lock", "locks/requirements-participant.lock")
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def packages(lock: str) -> Iterator[dict[str, Any]]:
    """The components that a lock names."""
    for block in re.split(r"\n(?=\S)", lock):
        if (pinned := _PINNED.match(block)) is None:
            continue
        name, version = pinned[1].lower().replace("_", "-"), pinned[2]
        yield {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            # One of them is of the file that is installed: which, depends on the machine.
            "hashes": [{"alg": "SHA-256", "content": one} for one in _HASH.findall(block)],
        }


def bill(locks: Sequence[Path]) -> dict[str, Any]:
    """The bill of materials. The same locks give the same text."""
    texts = [lock.read_text(encoding="utf-8") for lock in locks]
    found = {one["bom-ref"]: one for text in texts for one in packages(text)}
    project = tomllib.loads((ROOT / "coordinator/pyproject.toml").read_text(encoding="utf-8"))
    digest = hashlib.sha256("\n".join(texts).encode()).digest()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "xain-coordinator",
                "version": project["project"]["version"],
            }
        },
        "components": [found[ref] for ref in sorted(found)],
    }


if __name__ == "__main__":
    given = [Path(one) for one in sys.argv[1:]] or [ROOT / name for name in LOCKS]
    print(json.dumps(bill(given), indent=2))
