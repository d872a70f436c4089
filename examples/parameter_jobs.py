"""Four jobs side by side on the servers of one group: python parameter_jobs.py [HOST:PORT]

HOST:PORT is that of a group's scheduler; without it the group is in this process. A worker is a
thread here, and elsewhere a process of its own. Of n workers each has every n-th row. A worker
returns a function that scores the model when all workers of its job have ended.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split

import xain_parameters as parameters


def rows_of(load):
    """Training rows, test rows, and targets of both: columns of one scale, and last one of ones."""
    x, y = load(return_X_y=True)
    x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-9)
    return train_test_split(np.c_[x, np.ones(len(x))], y, random_state=0)


def logistic(server, index, count):
    """Logistic regression of tumours by gradient descent, bulk synchronous."""
    x, x_test, y, y_test = rows_of(load_breast_cancer)
    mine = slice(index, None, count)
    w = server.dense("w", x.shape[1], update=parameters.SGD(0.5), dtype="float64")
    for _ in server.clocks(staleness=0, workers=count, stop=200):
        probability = 1 / (1 + np.exp(-x[mine] @ w.pull()))
        w.push(x[mine].T @ (probability - y[mine]) / len(x))
    return lambda: np.mean((x_test @ w.pull() > 0) == y_test)


def svm(server, index, count):
    """Linear support vector machines, one for each digit, at most one clock stale."""
    x, x_test, y, y_test = rows_of(load_digits)
    x, y = x[index::count], y[index::count]
    sign = np.where(y[:, None] == np.arange(10), 1.0, -1.0)
    w = server.dense("w", (x.shape[1], 10), update=parameters.Adagrad(0.1), dtype="float64")
    for clock in server.clocks(staleness=1, workers=count, stop=200):
        batch = np.random.default_rng([index, clock]).choice(len(x), 100)
        now = w.pull()
        is_within_margin = sign[batch] * (x[batch] @ now) < 1
        w.push(1e-4 * now - x[batch].T @ (is_within_margin * sign[batch]) / 100)
    return lambda: np.mean((x_test @ w.pull()).argmax(axis=1) == y_test)


def kmeans(server, index, count):
    """Lloyd's k-means of wines: each worker assigns its clusters' sums of rows, and sizes."""
    x, *_ = rows_of(load_wine)
    mine, centres = x[index::count], x[:3]
    sums = server.table("sums", centres.size, update=parameters.Assign(), dtype="float64")
    for clock in server.clocks(staleness=0, workers=count, stop=30):
        if clock > 0:
            total = sums.pull(range(count)).sum(axis=0).reshape(centres.shape)
            centres = total / total[:, -1:]  # the last column of a row is one
        nearest = ((mine[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        sums.push([index], (np.eye(len(centres))[:, nearest] @ mine).reshape(1, -1))
    return lambda: ((x[:, None] - centres) ** 2).sum(axis=2).min(axis=1).sum()


def factors(server, index, count):
    """Matrix factorisation of images from four fifths of their pixels, asynchronous."""
    x = load_digits().data / 16
    is_hidden = np.random.default_rng(0).random(x.shape) < 0.2
    adagrad, ids = parameters.Adagrad(0.2), np.arange(index, len(x), count)
    images = server.table("images", 8, init=parameters.Uniform(0.1, seed=1), update=adagrad)
    pixels = server.dense("pixels", (64, 8), init=parameters.Uniform(0.1, seed=2), update=adagrad)
    for clock in server.clocks(staleness=None, workers=count, stop=300):
        batch = np.random.default_rng([index, clock]).choice(ids, 100, replace=False)
        u, v = images.pull(batch), pixels.pull()
        error = np.where(is_hidden[batch], 0, u @ v.T - x[batch]).astype(np.float32)
        images.push(batch, error @ v)
        pixels.push(error.T @ u)
    model = lambda: images.pull(range(len(x))) @ pixels.pull().T  # noqa: E731 - one line of algebra
    return lambda: np.sqrt(np.mean((model() - x)[is_hidden] ** 2))


WORKERS = {logistic: 2, svm: 3, kmeans: 2, factors: 2}


def main(target=None):
    """Train all jobs; returns the score of each by its name."""
    with ExitStack() as stack:
        if target is None:
            target = stack.enter_context(parameters.LocalGroup(shards=2)).target

        def work(job, index):
            connecting = parameters.connect_sync(
                target, worker=f"{job.__name__}-{index}", job=job.__name__
            )
            return job(stack.enter_context(connecting), index, WORKERS[job])

        with ThreadPoolExecutor(sum(WORKERS.values())) as pool:
            begun = {
                job: [pool.submit(work, job, i) for i in range(WORKERS[job])] for job in WORKERS
            }
        scores = {job: [each.result() for each in workers] for job, workers in begun.items()}
        return {job.__name__: float(score[0]()) for job, score in scores.items()}


if __name__ == "__main__":
    for name, score in main(*sys.argv[1:]).items():
        print(f"{name}: {score:.4f}")
