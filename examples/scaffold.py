"""SCAFFOLD beside federated averaging, on a problem where averaging ends in the wrong place.

Each site fits a vector to its own quadratic loss, 1/2 * sum(curvature * (w - target)^2). The sites
disagree about curvature and target, so many local steps draw each of them to its own optimum, and
the average of these is not the optimum of the mean loss. SCAFFOLD corrects every local step by
control variates: the site keeps its own, the server's travels with the weights. With torch,
round.correct(model, optimizer) is all that a script adds.

python scaffold.py, which needs no coordinator.

Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
algorithm 1 with option II.
"""

import numpy as np

import xain

NUM_SITES, SIZE, STEPS, LR = 4, 5, 20, 0.1


def problem(site):
    """Curvature and target of one site."""
    chance = np.random.default_rng(site)
    return chance.uniform(0.2, 3.0, SIZE), chance.normal(size=SIZE)


def optimum():
    """Minimum of the mean loss over all sites."""
    curvatures, targets = zip(*(problem(i) for i in range(NUM_SITES)), strict=True)
    return np.sum(np.multiply(curvatures, targets), axis=0) / np.sum(curvatures, axis=0)


def averaging(site):
    curvature, target = problem(site.index)
    for round in xain.rounds({"w": np.zeros(SIZE)}):
        w = round.weights["w"]
        for _ in range(STEPS):
            w = w - LR * curvature * (w - target)
        round.submit({"w": w}, samples=1)


def scaffold(site):
    curvature, target = problem(site.index)
    for round in xain.rounds({"w": np.zeros(SIZE)}, scaffold=True):
        w = round.weights["w"]
        for _ in range(STEPS):
            w = w - LR * (curvature * (w - target) + round.correction["w"])
        round.submit({"w": w}, samples=1, path=STEPS * LR)


def main():
    for algorithm in (averaging, scaffold):
        done = xain.simulate(algorithm, NUM_SITES, rounds=40, progress=False)
        distance = np.linalg.norm(done.weights["w"] - optimum())
        print(f"{algorithm.__name__}: {distance:.6f} from the optimum")


if __name__ == "__main__":
    main()
