"""Take a slice of the data that no other replica has, and run the participant with it:

    claim_slice.py PROGRAM [ARGUMENT ...]

Slice i belongs to the process that holds the lock on SLICES/i. The kernel releases it with the
process, however that ends, so no claim outlives its replica: one that was killed finds a slice free
when it comes back, and is the same participant again, since its name is that of the slice. Where
there are tokens (enrol.py), it first gets a certificate with that of its slice. Its
instance id is the container's host name, which stays over restarts of the container: the
coordinator takes it for the same process, and need not wait for the lease of the killed one.

The exit status is the participant's, or 1 if all slices are taken. Compose starts a container again
after every status but 0, so a status that is final (xain_foundation.exit_statuses) is printed and
becomes 0.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

SLICES = Path("/run/slices")
TOKENS = Path("/run/tokens")
CERTIFICATES = Path("/run/secrets/xain")  # of workers of the parameter server
STATE = Path("/tmp/xain-participant")  # of this container, and gone with it
PREFIX = "XAIN_PARTICIPANT_"  # of settings
NUM_PARTS = f"{PREFIX}PARTITION__NUM_PARTS"
FINAL = (4, 5, 6, 7)  # a test compares them; the image need not have the package
SIGNALLED = 128  # plus the number of the signal, as a shell counts


def main() -> None:
    num_parts = int(os.environ[NUM_PARTS])
    index = claim(num_parts)
    if index is None:
        sys.exit(f"claim_slice.py: all {num_parts} slices are taken; divide the data into more")
    os.environ[f"{PREFIX}PARTITION__INDEX"] = str(index)
    os.environ[f"{PREFIX}PARTICIPANT__ID"] = f"slice-{index}"
    os.environ[f"{PREFIX}PARTICIPANT__INSTANCE_ID"] = socket.gethostname()
    if CERTIFICATES.exists():
        os.environ["XAIN_PARAMETERS_TLS__FOLDER"] = str(CERTIFICATES / f"worker-{index}")
    program, *arguments = sys.argv[1:]
    status = 0
    if TOKENS.exists():
        # The other settings are for taking part, and some are no good without its file.
        others = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        token = str(TOKENS / f"slice-{index}.token")
        status = run([program, "join", token, f"--state-dir={STATE}"], others)
        # Not as its state directory: in a new one it would be another instance.
        os.environ[f"{PREFIX}TLS__FOLDER"] = str(STATE / "tls")
    sys.exit(status or run([program, *arguments]))


def run(command: list[str], env: dict[str, str] | None = None) -> int:
    """Run a program, which gets the signals of this process. Returns the status to exit with.

    env: instead of that of this process.
    """
    asked: list[int] = []
    program: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: object) -> None:
        asked.append(number)
        if program is not None:
            program.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    program = subprocess.Popen(command, close_fds=False, env=env)
    for number in asked:  # that came before the program was there
        program.send_signal(number)
    status = program.wait()
    if status in FINAL:
        sys.stderr.write(f"claim_slice.py: status {status} is final: no other start follows\n")
        return 0
    return status if status >= 0 else SIGNALLED - status


def claim(num_parts: int) -> int | None:
    """The first free slice; from now on ours. None if there is none."""
    for index in range(num_parts):
        slice_ = os.open(SLICES / str(index), os.O_RDONLY)
        try:
            fcntl.flock(slice_, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(slice_)
            continue
        # The lock lives as long as the descriptor. The program inherits it, and may outlive this
        # process, were that killed alone.
        os.set_inheritable(slice_, True)
        return index
    return None


if __name__ == "__main__":
    main()
