"""The health check of a participant's image: is its agent alive?

It looks at the file that XAIN_PARTICIPANT_PARTICIPANT__ALIVE_FILE names: its modification time is
the moment until which nothing need be heard. Also who waits for a coordinator that is away is
alive. Exit status 0 if it is; 1, with the reason in one line, if it is not, also while it loads its
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
