"""Ids that nobody else makes."""

import os
import subprocess
import sys

import pytest

from xain_messaging.format.ids import new_id

OF_ANOTHER_PROCESS = "from xain_messaging.format.ids import new_id; print(new_id())"


def test_no_two_are_the_same():
    """Here, and in a process that began the same way."""
    command = [sys.executable, "-c", OF_ANOTHER_PROCESS]
    others = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    assert others[0] != others[1]
    assert len({new_id() for _ in range(1000)}) == 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_makes_others():
    """A forked process has the numbers of its parent, and letters of its own."""
    program = """if True:
        import os
        from xain_messaging.format.ids import new_id
        for _ in range(2):
            if os.fork() == 0:
                os.write(1, f"{new_id()} ".encode())
                os._exit(0)
        for _ in range(2):
            os.wait()
        os.write(1, new_id().encode())
    """
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert len(set(shown.split())) == 3
