"""A simulation on a Ray cluster, as a script of its own: Ray leaves files open in its process.

    python on_ray.py MAIN PARTICIPANTS ADDRESS FOLDER

Writes into FOLDER/result the bits of the model as hexadecimal digits, or the error that ended the
simulation.
"""

import sys
from pathlib import Path

import support.simulated as scripts
import xain


def main() -> None:
    name, number, address, folder = sys.argv[1:]
    try:
        result = trained(
            name,
            int(number),
            folder,
            backend="ray",
            address=address,
            state_dir=Path(folder).with_suffix(".state"),
        ).hex()
    except xain.SessionError as error:
        result = str(error)
    (Path(folder) / "result").write_text(result)


def trained(name: str, number: int, folder: str, **more: object) -> bytes:
    """The bits of the model of four rounds in which all have counted."""
    done = xain.simulate(
        getattr(scripts, name),
        number,
        workers=2,
        rounds=4,
        train={"folder": folder},
        # Longer than it takes until a node's loss is noticed.
        settings={"server.heartbeat_timeout_s": 300.0},
        progress=False,
        **more,
    )
    assert [entry["num_updates"] for entry in done.history] == [number] * 4
    return done.weights["w"].tobytes()


if __name__ == "__main__":
    main()
