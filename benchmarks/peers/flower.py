"""Flower as it is deployed: a SuperLink, a SuperNode for each participant, and an app in them."""

import time
from contextlib import ExitStack
from pathlib import Path

from peers.environments import Found, PeerFailed, environment, intervals, prepare, tree, wait
from xain_foundation.net.sockets import free_ports

PACKAGE, VERSION = "flwr", "1.41.0"
APP = Path(__file__).with_name("flower_app")
ROUND_LIMIT_S = 60.0
START_LIMIT_S = 120.0
SETTLE_S = 5.0


def run(folder: Path, participants: int, size: int, rounds: int) -> Found:
    """Raises PeerFailed."""
    programs = environment(PACKAGE, VERSION)
    names = [f"p{i}" for i in range(participants)]
    prepare(folder, names, size)
    home, times = folder / "home", folder / "times"
    home.mkdir()
    port = free_ports(1)[0]
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "bench"\n\n'
        f'[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n',
        encoding="utf-8",
    )
    environ = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    # Their programs call each other by name.
    environ["PATH"] = f"{programs}:/usr/bin:/bin"
    link_command = [
        *(programs / "flower-superlink", "--insecure", "--host", "127.0.0.1"),
        *("--port", str(port), "--disable-runtime-dependency-installation"),
    ]
    with ExitStack() as stack:
        link = stack.enter_context(tree(link_command, folder / "superlink.log", environ))
        time.sleep(SETTLE_S)  # the SuperLink does not say when it serves; nodes would try again
        nodes = [
            stack.enter_context(
                tree(
                    [
                        *(programs / "flower-supernode", "--insecure"),
                        *("--superlink", f"127.0.0.1:{port}", "--port", str(free_ports(1)[0])),
                        *("--node-config", f'update="{folder / name}.npy"'),
                    ],
                    folder / f"{name}.log",
                    environ,
                )
            )
            for name in names
        ]
        settings = (
            f"rounds={rounds} participants={participants} "
            f'model="{folder / "model.npy"}" times="{times}"'
        )
        submit = [programs / "flwr", "run", APP, "bench", "--run-config", settings, "--stream"]
        main = stack.enter_context(tree(submit, folder / "run.log", environ))
        wait(main, [link, *nodes], START_LIMIT_S + rounds * ROUND_LIMIT_S)
        seconds = intervals([float(line) for line in times.read_text().split()])
        if len(seconds) != rounds:
            raise PeerFailed(f"it made {len(seconds)} rounds, not {rounds}\n{main.tail()}")
        return Found(seconds, link.peak_mb)
