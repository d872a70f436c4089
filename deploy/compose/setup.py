"""Files that the compose stack needs, made at its first start: random credentials, certificates of
the store, of InfluxDB and of the parameter server, one file for each slice of the data, and a
folder for the tokens that each coordinator makes (enrol.py).

Each folder below ROOT is a volume that only its service reads, so the files may be readable within.
Files that exist are kept: the stores know the first credentials only. Only names are printed.
"""

# ruff: noqa: T201 - a script speaks by printing

import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from xain_foundation.security.identity import Identity, Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE, KEY
from xain_foundation.security.x509 import Authority, key_to_pem, make_request, new_key, read_request

ROOT = Path("/run/setup")
BUCKET = "xain"
LIFETIME_S = 10 * 365 * 86_400.0  # nobody renews them


def main() -> None:
    os.umask(0o022)
    make_s3_credentials()
    make_certificates_of_stores()
    make_certificates_of_parameters(int(os.environ["SLICES"]))
    token = keep(ROOT / "influxdb/token", secrets.token_urlsafe(48))
    keep(ROOT / "influxdb/password", secrets.token_urlsafe(24))
    keep(ROOT / "coordinator/influxdb-token", token)
    keep(ROOT / "grafana/token", token)
    keep(ROOT / "grafana/password", secrets.token_urlsafe(24))
    for slices in sorted(ROOT.glob("slices*")):
        for index in range(int(os.environ["SLICES"])):
            keep(slices / str(index), "")
    for tokens in ROOT.glob("tokens*"):
        tokens.chmod(0o1777)  # only a coordinator mounts it to write


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


def make_certificates_of_stores() -> None:
    """Under the names that MinIO wants. The authority's certificate is written last: where it is,
    all are there."""
    known = ROOT / "authority/ca.crt"
    if known.exists():
        return
    authority = Authority.create("xain-stores", time.time(), LIFETIME_S)
    for name in ("s3", "influxdb"):
        key, certificate = issue(authority, Role.NODE, name, (name, "localhost", "127.0.0.1"))
        write(ROOT / name / "tls/private.key", key)
        write(ROOT / name / "tls/public.crt", certificate)
    write(ROOT / "grafana/ca.crt", authority.certificate)
    write(known, authority.certificate)


def make_certificates_of_parameters(num_workers: int) -> None:
    """One for each worker. Scheduler and servers, whose names are those of their containers, share
    one that may act for all of them; it is written last."""
    servers = ROOT / "parameters"
    folders = [*(ROOT / f"workers/worker-{i}" for i in range(num_workers)), servers]
    if all((folder / CERTIFICATE).exists() for folder in folders):
        return
    authority = Authority.create("xain-parameters", time.time(), LIFETIME_S)
    (servers / CERTIFICATE).unlink(missing_ok=True)
    for folder in folders:
        role = Role.COORDINATOR if folder == servers else Role.PARTICIPANT
        key, certificate = issue(authority, role, folder.name)
        write(folder / AUTHORITY, authority.certificate)
        write(folder / KEY, key)
        write(folder / CERTIFICATE, certificate)


def issue(
    authority: Authority, role: Role, name: str, hosts: Sequence[str] = ()
) -> tuple[bytes, bytes]:
    """(key, certificate). The authority's own key is kept nowhere: nobody can make another one that
    counts."""
    key, identity = new_key(), Identity(authority.name, role, name)
    request = read_request(make_request(key, name))
    certificate = authority.issue(request, identity, time.time(), LIFETIME_S, hosts=hosts)
    return key_to_pem(key), certificate


def keep(file: Path, text: str) -> str:
    """The file's text, after writing this one if there is no file."""
    if not file.exists():
        write(file, text.encode())
    return file.read_text(encoding="utf-8")


def write(file: Path, content: bytes) -> None:
    """Whole or not at all: a container may be stopped at any time."""
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_name(f".{file.name}.new")
    unfinished.write_bytes(content)
    unfinished.replace(file)
    print(f"made {file.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
