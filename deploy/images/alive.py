"""The health check of a participant's image: is its agent alive?

The modification time of the file that XAIN_PARTICIPANT_PARTICIPANT__ALIVE_FILE names is the time at
which the next sign of life is due. A participant that waits for a coordinator is alive, too. Exit
status 0 if the agent is alive; 1, with the reason in one line, if not, also while it loads its
data.
"""

# ruff: noqa: T201 - a script speaks by printing

import os
import sys
import time
from pathlib import Path


def main() -> int:
    file = Path(os.environ["XAIN_PARTICIPANT_PARTICIPANT__ALIVE_FILE"])
    try:
        until = file.stat().st_mtime
    except FileNotFoundError:
        until = 0.0
    if until == 0:
        print("not begun yet")
        return 1
    late_s = time.time() - until
    if late_s > 0:
        print(f"a sign of life is {late_s:.0f} s late")
        return 1
    print("alive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
