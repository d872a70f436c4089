"""Output of the SDK in a program of its user, whose logging it leaves alone."""

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import gc, logging, signal, sys, threading
    import numpy as np
    from xain_participant import Participant, run

    if "configured" in sys.argv:
        logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")

    def state():
        root = logging.getLogger()
        return (
            root.level, root.handlers[:], logging.getLogger("xain_participant").level,
            logging._srcfile, logging.logThreads, logging.logProcesses, logging.lastResort,
            [signal.getsignal(n) for n in signal.valid_signals()],
            sys.excepthook, threading.excepthook, gc.get_threshold(), gc.get_freeze_count(),
        )

    class Still(Participant):
        def init_weights(self):
            return np.zeros(4)

        def train_round(self, weights, epochs, epoch_base):
            logging.getLogger("program").info("during")
            assert state() == before
            return weights, 1

    before = state()
    logging.getLogger("program").info("before")
    status = run(Still(), sys.argv[1], "ward-7")
    logging.getLogger("program").info("after")
    assert state() == before
    print("done")
    sys.exit(status)
    """
)


def run_program(target: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM, target, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    return done


def test_run_prints_nothing_where_no_logs_are_configured(serve):
    """An ordinary run has no warnings and no errors, and standard output is the caller's."""
    assert run_program(serve().target).stderr == ""


def test_run_leaves_logging_of_its_caller_alone(serve):
    """The caller's own lines appear before, during and after run(), and those of the agent too."""
    lines = run_program(serve().target, "configured").stderr.splitlines()
    own = [line for line in lines if line.startswith("program ")]
    assert own[0] == "program INFO before"
    assert own[-1] == lines[-1] == "program INFO after"
    assert set(own[1:-1]) == {"program INFO during"}
    agent = [line.split(" ") for line in lines if line.startswith("xain_participant.")]
    assert len(own) + len(agent) == len(lines)
    name = "xain_participant.agent.agent"
    assert agent[-1][:4] == [name, "INFO", "exiting", "participant='ward-7'"]
