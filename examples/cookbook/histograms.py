"""Statistics over the rows of all sites, of which each site sends sums: mean, deviation, histogram.

python histograms.py

No model is trained. What a round makes is the sum of what the sites send.
"""

import threading

import numpy as np
from sklearn.datasets import load_breast_cancer

import xain

SITES = ("north", "east", "south")
BINS = 12
NOTHING = {"moments": np.zeros(3), "histogram": np.zeros(BINS)}

# --- data ---


def load(name):
    """The mean radius of the tumours of a site's patients."""
    return load_breast_cancer().data[SITES.index(name) :: len(SITES), 0]


# --- at a site ---


def site(name, coordinator):
    x = load(name)
    for round in xain.rounds(NOTHING, id=name, coordinator=coordinator):
        sums = {"moments": np.array([len(x), x.sum(), (x**2).sum()])}
        low, high = round.config.get("between", (0.0, 1.0))
        sums["histogram"] = np.histogram(np.clip(x, low, high), BINS, (low, high))[0].astype(float)
        round.submit(sums, samples=len(x))


# --- at the server ---


def main():
    with xain.session(
        NOTHING,
        rounds=2,  # the second one knows where the bins begin and end
        min_participants=len(SITES),
        rule="sum",
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            threading.Thread(target=site, args=(name, session.address), daemon=True).start()
        between = None
        for round in session:
            if between is not None:
                round.configure(between=between)
            sums = round.run().weights
            count, total, squares = sums["moments"]
            mean = total / count
            deviation = np.sqrt(squares / count - mean**2)
            between = [mean - 2 * deviation, mean + 2 * deviation]
    print(f"{count:.0f} rows, mean {mean:.3f}, deviation {deviation:.3f}")
    print("histogram", *sums["histogram"].astype(int))


if __name__ == "__main__":
    main()
