"""Doing what the session wants done: the initial model, aggregation, metrics.

Heavy work runs in threads, off the event loop. A store that is away is waited for: the session
stays where it is and goes on when the store is back.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import structlog

from xain_coordinator.aggregation.engine import Fenced, UpdateChanged, aggregate, publish
from xain_coordinator.core.commands import (
    AggregationDone,
    Command,
    EffectFailed,
    InitialisationDone,
)
from xain_coordinator.core.effects import Aggregate, Effect, InitialiseModel, RecordMetrics
from xain_coordinator.core.errors import StaleModel, Unavailable
from xain_coordinator.core.session import model_key
from xain_coordinator.core.values import GlobalModel
from xain_coordinator.driver import Driver
from xain_coordinator.ports import KeyNotFound, MetricsStore, StoreUnavailable, WeightsStore
from xain_proto.np import npy_header
from xain_workloads.model import Model
from xain_workloads.workload import Workload

log = structlog.get_logger(__name__)

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 10.0


class StoreWorker:
    """Works on a weights store and a metrics store.

    workload: makes the initial model; None where the participants bring it.
    """

    def __init__(
        self,
        driver: Driver,
        store: WeightsStore,
        metrics: MetricsStore,
        workload: Workload | None,
    ) -> None:
        self._driver = driver
        self._store = store
        self._metrics = metrics
        self._workload = workload
        self._tasks: set[asyncio.Task[None]] = set()

    def perform(self, effect: Effect) -> None:
        match effect:
            case RecordMetrics(points):
                self._metrics.write(points)
            case InitialiseModel():
                self._begin(self._run("initialise", lambda: self._initialise(effect)))
            case Aggregate():
                self._begin(self._run("aggregate", lambda: self._aggregate(effect)))
            case _:
                raise AssertionError(f"nobody does {effect}")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, name: str, work: Callable[[], Command]) -> None:
        """Do the work in a thread, until it is done or cannot be."""
        delay = FIRST_RETRY_S
        while True:
            round_ = self._driver.session.round
            try:
                command = await asyncio.to_thread(work)
                break
            except StoreUnavailable as error:
                log.warning("store_unavailable", work=name, round=round_, error=str(error))
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_S)
            except Fenced as error:
                self._driver.fail(error)
                return
            except (UpdateChanged, KeyNotFound, ValueError) as error:
                log.error("work_failed", work=name, round=round_, error=str(error))
                command = EffectFailed(f"{name} failed in round {round_}: {error}")
                break
            except Exception as error:
                # A defect of ours must end the process loudly, not leave the round hanging.
                log.exception("work_crashed", work=name, round=round_)
                self._driver.fail(error)
                return
        try:
            await self._driver.submit(command)
        except (Unavailable, StaleModel) as refusal:
            log.info("work_not_needed", work=name, round=round_, reason=str(refusal))

    async def close(self) -> None:
        """Stop waiting for a store. A thread that is at work ends by itself; its result is not
        used, and the next start does the work again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _initialise(self, effect: InitialiseModel) -> Command:
        if effect.initial == "empty":
            model = Model(np.empty((0,), np.float32), ())
        else:
            if self._workload is None:
                raise ValueError("the session needs [workload] name to make its initial model")
            model = self._workload.initial_model(effect.profiles)
        return InitialisationDone(store_model(self._store, 0, model))

    def _aggregate(self, effect: Aggregate) -> Command:
        return AggregationDone(aggregate(self._store, effect))


def store_model(store: WeightsStore, round_: int, model: Model) -> GlobalModel:
    """Publish a model that is at hand as the one that `round_` starts from."""
    vector = model.vector
    header = npy_header(vector.dtype, vector.shape)
    ref = publish(store, model_key(round_), [header, vector.tobytes()])
    return GlobalModel(
        round=round_,
        ref=ref,
        dtype=vector.dtype.name,
        shape=vector.shape,
        layout=model.layout,
        metadata=dict(model.metadata),
    )
