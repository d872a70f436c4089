"""Give the coordinator its certificate before its first start, make tokens for its participants,
and run it:

    enrol.py HOST PROGRAM [ARGUMENT ...]

HOST is the name by which participants connect. There is a token for each slice of the data, of the
slice's name; it counts at each start of a replica, since containers keep no certificate. Tokens are
made anew at a start when half of their time is over, or when they are older than the authority: its
volume may have been removed to train anew.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ACCESS = Path("/var/lib/xain/access")
TOKENS = Path("/run/tokens")
DAYS = 90


def main() -> None:
    host, *command = sys.argv[1:]
    program = command[0]
    if not (ACCESS / "tls").exists():
        subprocess.run([program, "certs", "init", f"--host={host}"], check=True)
    num_parts = int(os.environ["SLICES"])
    if not all(is_fresh(TOKENS / f"slice-{index}.token") for index in range(num_parts)):
        names = "slice-0" if num_parts == 1 else f"slice-{{0..{num_parts - 1}}}"
        kind = ("--reusable", f"--ttl={DAYS}d", f"--name={names}", f"--to={TOKENS}")
        subprocess.run([program, "tokens", "create", *kind], check=True)
    os.execvp(program, command)


def is_fresh(token: Path) -> bool:
    try:
        made_at = token.stat().st_mtime
        is_ours = made_at >= (ACCESS / "ca.crt").stat().st_mtime
        return is_ours and time.time() - made_at < DAYS / 2 * 86_400
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
