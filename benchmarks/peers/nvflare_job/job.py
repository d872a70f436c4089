"""Federated averaging in NVFLARE's simulator, which runs a process for each client.

    job.py FOLDER PARTICIPANTS ROUNDS

FOLDER/model.npy is the first model; train.py tells of the rest.
"""

import sys
from pathlib import Path

from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe.sim_env import SimEnv


def main() -> None:
    folder, participants, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    recipe = NumpyFedAvgRecipe(
        name="rounds",
        initial_ckpt=str(folder / "model.npy"),
        min_clients=participants,
        num_rounds=rounds,
        train_script=str(Path(__file__).with_name("train.py")),
        train_args=str(folder),
    )
    recipe.execute(SimEnv(num_clients=participants, workspace_root=str(folder / "workspace")))


if __name__ == "__main__":
    main()
