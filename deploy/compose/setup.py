"""Files that the compose stack needs, made at its first start: random credentials, and one file
for each slice of the data.

Each folder below ROOT is a volume that only its service reads, so the files may be readable within.
Files that exist are kept: the stores know the first credentials only. Only names are printed.
"""

# ruff: noqa: T201 - a script speaks by printing

import json
import os
import secrets
from pathlib import Path

ROOT = Path("/run/setup")
BUCKET = "xain"


def main() -> None:
    os.umask(0o022)
    make_s3_credentials()
    token = keep(ROOT / "influxdb/token", secrets.token_urlsafe(48))
    keep(ROOT / "influxdb/password", secrets.token_urlsafe(24))
    keep(ROOT / "coordinator/influxdb-token", token)
    keep(ROOT / "grafana/token", token)
    keep(ROOT / "grafana/password", secrets.token_urlsafe(24))
    for slices in sorted(ROOT.glob("slices*")):
        for index in range(int(os.environ["SLICES"])):
            keep(slices / str(index), "")


def make_s3_credentials() -> None:
    """One identity, for one bucket."""
    access_key_id = keep(ROOT / "coordinator/s3-access-key-id", secrets.token_hex(10).upper())
    secret = keep(ROOT / "coordinator/s3-secret-access-key", secrets.token_urlsafe(30))
    identity = {
        "name": "coordinator",
        "credentials": [{"accessKey": access_key_id, "secretKey": secret}],
        "actions": [f"{action}:{BUCKET}" for action in ("Admin", "List", "Read", "Write")],
    }
    keep(ROOT / "s3/s3.json", json.dumps({"identities": [identity]}, indent=2))
    # The same for servers that take them from files, such as MinIO.
    keep(ROOT / "s3/access-key-id", access_key_id)
    keep(ROOT / "s3/secret-access-key", secret)


def keep(file: Path, text: str) -> str:
    """The file's text, after writing this one if there is no file. Whole or not at all: a container
    may be stopped at any time."""
    if not file.exists():
        unfinished = file.with_name(f".{file.name}.new")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
        print(f"made {file.relative_to(ROOT)}", flush=True)
    return file.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
