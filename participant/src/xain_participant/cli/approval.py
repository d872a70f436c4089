"""The approval of what leaves a site before a training, by a person, once."""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from getpass import getuser
from hashlib import sha256
from pathlib import Path

from xain_foundation.settings.hints import hint
from xain_workloads.tables.profile import DataProfile

_NAME = "approval.json"


def approval_file(state_dir: Path | None, config: Path | None) -> Path:
    """The file of the approval: in the state directory, or beside the configuration, or here."""
    if state_dir is not None:
        return state_dir / _NAME
    return Path(_NAME) if config is None else config.with_name(f"{config.stem}.{_NAME}")


def digest_of(profile: DataProfile) -> str:
    """The digest of all that is sent before a training. It changes with the data."""
    return sha256(json.dumps(asdict(profile), sort_keys=True).encode()).hexdigest()


def record(file: Path, profile: DataProfile) -> None:
    """Write down who has approved the profile, and when. Raises OSError."""
    approval = {
        "who": _user(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "digest": digest_of(profile),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(approval, indent=2) + "\n", encoding="utf-8")


def _user() -> str:
    """Name of the user of this process."""
    try:
        return getuser()
    except (KeyError, OSError):  # a container's user may have a number alone
        return f"user {os.getuid()}"


def why_not_approved(file: Path, profile: DataProfile) -> str:
    """Why this profile may not be sent; "" if a person has approved it."""
    how = hint("xain-participant", "xain-participant inspect --approve")
    try:
        approved = json.loads(file.read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"nobody has approved what leaves this site: there is no {file}; {how}"
    if approved != digest_of(profile):
        return f"the data are not those that were approved in {file}; {how} again"
    return ""
