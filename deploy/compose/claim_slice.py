"""Take a slice of the data that no other replica has, then become the participant:

    claim_slice.py PROGRAM [ARGUMENT ...]

Slice i belongs to the process that holds the lock on SLICES/i. The kernel releases it with the
process, however that ends, so no claim outlives its replica: one that was killed finds a slice free
when it comes back, and is the same participant again, since its name is that of the slice. Its
instance id is the container's host name, which stays over restarts of the container: the
coordinator takes it for the same process, and need not wait for the lease of the killed one.

Exit status 1 if all slices are taken.
"""

import fcntl
import os
import socket
import sys
from pathlib import Path

SLICES = Path("/run/slices")
NUM_PARTS = "XAIN_PARTICIPANT_PARTITION__NUM_PARTS"


def main() -> None:
    num_parts = int(os.environ[NUM_PARTS])
    index = claim(num_parts)
    if index is None:
        sys.exit(f"claim_slice.py: all {num_parts} slices are taken; divide the data into more")
    os.environ["XAIN_PARTICIPANT_PARTITION__INDEX"] = str(index)
    os.environ["XAIN_PARTICIPANT_PARTICIPANT__ID"] = f"slice-{index}"
    os.environ["XAIN_PARTICIPANT_PARTICIPANT__INSTANCE_ID"] = socket.gethostname()
    os.execvp(sys.argv[1], sys.argv[1:])


def claim(num_parts: int) -> int | None:
    """The first free slice; from now on ours. None if there is none."""
    for index in range(num_parts):
        slice_ = os.open(SLICES / str(index), os.O_RDONLY)
        try:
            fcntl.flock(slice_, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(slice_)
            continue
        # The lock lives as long as the descriptor, which the program is to inherit.
        os.set_inheritable(slice_, True)
        return index
    return None


if __name__ == "__main__":
    main()
