"""xain-participant, except that it renews its certificate as soon as it has one, again and again,
and kills itself (kill -9) before its n-th change of the disk for a certificate.

    python dying_site.py N ARGUMENTS...

With 0 it does not kill itself. No certificate is short-lived here, so that nothing depends on the
speed of the machine.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from xain_foundation.net.backoff import Backoff
from xain_participant.cli.cli import main
from xain_participant.enrolment.kept import KeptCertificates
from xain_participant.enrolment.upkeep import Upkeep

last_step = int(sys.argv.pop(1))
counter = itertools.count(1)
asking, init = KeptCertificates.asking, Upkeep.__init__
is_asking = False


@contextmanager
def noticed(kept: KeptCertificates) -> Iterator[None]:
    global is_asking
    with asking(kept):
        is_asking = True
        yield
        is_asking = False


def dying(call: Callable[..., Any]) -> Callable[..., Any]:
    def before_it(*args: Any, **kwargs: Any) -> Any:
        if is_asking and next(counter) == last_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return before_it


def hasty_init(upkeep: Upkeep, *args: Any, **kwargs: Any) -> None:
    init(upkeep, *args, **kwargs)
    upkeep._backoff = Backoff(0.05, 0.5, Random())


KeptCertificates.asking = noticed
for module, name in ((os, "fsync"), (os, "mkdir"), (Path, "replace"), (Path, "symlink_to")):
    setattr(module, name, dying(getattr(module, name)))
Upkeep.__init__, Upkeep._due_at = hasty_init, lambda _: 0.0
sys.exit(main())
