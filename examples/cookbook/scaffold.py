"""SCAFFOLD beside federated averaging, where sites that differ draw the average to a wrong place.

python scaffold.py

Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning".
"""

import threading

import numpy as np

import xain

SITES = ("north", "east", "south", "west")
SIZE, STEPS, LR = 5, 20, 0.1
MODEL = {"w": np.zeros(SIZE)}

# --- data, model and training, as without federation ---


def load(name):
    """Curvature and target of a site's loss, 1/2 * sum(curvature * (w - target)^2)."""
    chance = np.random.default_rng(SITES.index(name))
    return chance.uniform(0.2, 3.0, SIZE), chance.normal(size=SIZE)


def train(w, curvature, target, correction):
    for _ in range(STEPS):
        w = w - LR * (curvature * (w - target) + correction)
    return w


def optimum():
    """The minimum of the mean loss over all sites."""
    curvatures, targets = zip(*map(load, SITES), strict=True)
    return np.sum(np.multiply(curvatures, targets), axis=0) / np.sum(curvatures, axis=0)


# --- at a site ---


def site(name, coordinator, corrects):
    curvature, target = load(name)
    for round in xain.rounds(MODEL, id=name, coordinator=coordinator, scaffold=corrects):
        correction = round.correction["w"] if corrects else 0.0
        w = train(round.weights["w"], curvature, target, correction)
        round.submit({"w": w}, samples=1, path=STEPS * LR if corrects else None)


# --- at the server ---


def distance_of(corrects, folder):
    """Distance of the last model from the optimum."""
    with xain.session(
        MODEL,
        scaffold=corrects,
        rounds=40,
        min_participants=len(SITES),
        data_dir=folder,
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            arguments = (name, session.address, corrects)
            threading.Thread(target=site, args=arguments, daemon=True).start()
        for round in session:
            round.run()
    return np.linalg.norm(np.asarray(session.result.weights["w"]) - optimum())


def main():
    print(f"averaging: {distance_of(False, 'averaging'):.6f} from the optimum")
    print(f"scaffold: {distance_of(True, 'scaffold'):.6f} from the optimum")


if __name__ == "__main__":
    main()
