"""100 participants simulated in two processes: a small CNN on scikit-learn's digits.

    python benchmarks/simulation.py [--participants 100] [--rounds 40]

Runs examples/simulate.py: a tenth of the participants trains each round, five passes over a
hundredth of the data each. The first rounds, in which PyTorch's imports settle, are left out of the
median. Beside a round stands one epoch of the same network on all of the data, in one process with
one thread. Prints figures; writes bench-results/simulation.json. Needs PyTorch: make setup-torch.
"""

import statistics
import sys
import time
from pathlib import Path

import flags
import results

EXAMPLES = Path(__file__).parents[1] / "examples"
LEFT_OUT = 3  # rounds
EPOCHS = 5  # of which the median is taken


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--participants", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    if args.quick:
        args.participants, args.rounds = 4, LEFT_OUT + 1
    results.begin(quick=args.quick, any_load=args.any_load)
    sys.path.insert(0, str(EXAMPLES))  # workers import the script by its name
    import simulate
    import torch

    import xain

    done = xain.simulate(
        simulate.main,
        args.participants,
        workers=1 if args.quick else 2,  # each imports PyTorch
        rounds=args.rounds,
        fraction=0.1,
        epochs=1 if args.quick else 5,
        progress=False,
    )
    rounds = [entry["seconds"] for entry in done.history][LEFT_OUT:]
    x, y, *_ = simulate.digits()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in a worker; such small batches gain nothing by a second
    model = simulate.make_model()
    epochs = []
    for _ in range(1 if args.quick else EPOCHS):
        begin = time.perf_counter()
        simulate.train(model, x, y, epochs=1)
        epochs.append(time.perf_counter() - begin)
    epoch_s = statistics.median(epochs)
    round_s = statistics.median(rounds)
    results.report(
        "simulation",
        {
            "participants": args.participants,
            "trained_a_round": max(1, args.participants // 10),
            "workers": 2,
            "rounds": args.rounds,
            "accuracy": simulate.accuracy(done.weights),
            "round_s_median": round_s,
            "centralised_epoch_s": epoch_s,
            "ratio_to_centralised_epoch": round_s / epoch_s,
            "whole_s": done.seconds,
        },
    )


if __name__ == "__main__":
    main()
