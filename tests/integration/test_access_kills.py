"""Processes that issue, join, renew and revoke are killed, again and again, at steps of the audit
log and at any other instant; what was acknowledged counts.

    KILLS=200 SEED=7 pytest tests/integration/test_access_kills.py
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support import access_loop
from support.access_loop import Book, caller_of, requests_of
from support.process import PATIENCE_S
from xain_coordinator.access import audit_log
from xain_coordinator.access.control import AccessControl, initialise
from xain_coordinator.access.errors import Refusal, Unauthenticated
from xain_coordinator.access.evolve import fold
from xain_coordinator.access.records import event_of
from xain_coordinator.access.values import Access, Token
from xain_foundation.security.tls import Certificates
from xain_foundation.security.x509 import key_to_pem, new_key

KILLS = int(os.environ.get("KILLS") or 30)
SEED = int(os.environ.get("SEED") or 0)
NUM_KEYS = 3
SAMPLE = 10  # of what earlier processes were answered, looked at after each kill

pytestmark = pytest.mark.timeout(600 + 60 * KILLS)


def test_acknowledged_changes_of_access_survive_kills(tmp_path):
    """No token counts for two keys, a lost answer leaves no site outside, nothing is valid after an
    acknowledged revocation, the chain verifies, and the log is the state."""
    chance = Random(SEED)
    folder, keys, acknowledged = (tmp_path / name for name in ("access", "keys", "acknowledged"))
    initialise(folder, ["localhost"])
    keys.mkdir()
    for number in range(NUM_KEYS):
        (keys / f"{number}.key").write_bytes(key_to_pem(new_key()))
    num_torn = 0
    for _ in range(KILLS):
        kind = chance.choice(("before", "torn", "unsynced", "after", "outside"))
        death = [] if kind == "outside" else [kind, str(chance.randint(1, 30))]
        arguments = [str(folder), str(keys), str(acknowledged), str(chance.randrange(2**32))]
        num_before = len(Book(acknowledged).entries)
        with subprocess.Popen(
            [sys.executable, access_loop.__file__, *arguments, *death], stderr=subprocess.PIPE
        ) as process:
            if not death:
                until(acknowledged, num_before + chance.randint(1, 60), process)
                process.kill()
            _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGKILL, errors.decode()
        num_torn += audit_log.verify(folder / "audit.log").num_torn_bytes > 0
        check(folder, requests_of(keys), Book(acknowledged), num_before, chance)
    check(folder, requests_of(keys), Book(acknowledged), 0, chance)
    assert num_torn or KILLS < 30


def until(path: Path, num_lines: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a file has so many lines."""
    ends_at = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < ends_at:
        if path.exists() and path.read_bytes().count(b"\n") >= num_lines:
            return
        time.sleep(0.001)  # a poll: it ends when the lines are there


def check(folder: Path, requests: list[bytes], book: Book, num_before: int, chance: Random) -> None:
    """All that the last process was answered holds, and a sample of what earlier ones were.

    num_before: entries of the book that are older.
    """
    older = book.entries[:num_before]
    looked_at = book.entries[num_before:] + chance.sample(older, min(SAMPLE, len(older)))
    with closing(AccessControl.open(folder)) as control:
        lines = list(audit_log.read(folder / "audit.log"))
        events = [event for event in map(event_of, lines) if event is not None]
        assert fold(Access(), events) == control.access
        hashes = {line.sequence - 1: line.previous for line in lines}
        hashes[control.num_lines] = control.last_hash
        revoked = {serial for each in book.of_kind("revoked") for serial in each["serials"]}
        assert revoked <= control.access.revoked
        Certificates(folder / "tls")
        for entry in looked_at:
            check_entry(control, requests, entry, hashes)
        for issued in list(control.access.issued.values()):
            if isinstance(issued, Token) and not issued.reusable:
                used_by = {
                    key for basis, key in control.access.certificates if basis == issued.serial
                }
                assert len(used_by) <= 1


def check_entry(
    control: AccessControl, requests: list[bytes], entry: dict[str, Any], hashes: dict[int, str]
) -> None:
    is_revoked = entry.get("serial") in control.access.revoked
    match entry["kind"]:
        case "log":
            assert hashes[entry["num_lines"]] == entry["last_hash"]
        case "bearer":
            with refused_if(is_revoked):
                assert control.bearer(entry["text"]).serial == entry["serial"]
        case "token":
            joined = [joins(control, entry["certificate"], request) for request in requests]
            if not is_revoked and not entry["reusable"]:
                # The key that it counts for, or if there was none, the first that comes now.
                assert sum(each is not None for each in joined) == 1
        case "certificate":
            with refused_if(is_revoked):
                control.check(caller_of(entry["certificate"]))
            basis = caller_of(entry["basis_certificate"])
            again = control.join if entry["how"] == "join" else control.renew
            with refused_if(is_revoked or basis.serial in control.access.revoked):
                arguments = ("ipv4:10.0.0.2:1",) if entry["how"] == "join" else ()
                certificate = again(basis, requests[entry["key"]], *arguments)
                assert certificate.decode() == entry["certificate"]


def refused_if(is_revoked: bool) -> Any:
    return pytest.raises(Unauthenticated, match="was revoked") if is_revoked else nullcontext()


def joins(control: AccessControl, token: str, request: bytes) -> bytes | None:
    try:
        return control.join(caller_of(token), request, "ipv4:10.0.0.9:1")
    except Refusal as refusal:
        if refusal.code not in ("TOKEN_USED", "UNAUTHENTICATED"):
            raise
        return None
