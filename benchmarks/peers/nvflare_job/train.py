"""Training that takes no time: the update is there before the first round begins.

    train.py FOLDER

FOLDER/SITE.npy is the update; the times at which models came go to FOLDER/SITE.times.
"""

import sys
import time
from pathlib import Path

import numpy as np
import nvflare.client as flare
from nvflare.app_common.np.constants import NPConstants


def main() -> None:
    flare.init()
    folder = Path(sys.argv[1])
    site = flare.get_site_name()
    update = np.load(folder / f"{site}.npy")
    with (folder / f"{site}.times").open("a", encoding="utf-8", buffering=1) as times:
        while flare.is_running():
            model = flare.receive()
            if model is None:
                break
            times.write(f"{time.time()}\n")
            assert model.params[NPConstants.NUMPY_KEY].shape == update.shape
            params = {NPConstants.NUMPY_KEY: update}
            flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 10}))


if __name__ == "__main__":
    main()
