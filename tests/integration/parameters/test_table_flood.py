"""A stranger declares tables at the scheduler of a group that serves pushes."""

import time
from collections import Counter

import grpc
import numpy as np
from msgspec.structs import replace

from support.waiting import wait_until
from xain_parameters import LocalGroup
from xain_parameters.scheduler.service import NEW_TABLES_AT_ONCE, NEW_TABLES_PER_S
from xain_parameters.specs import MAX_NAME_BYTES, Plugin, TableSpec, encoded
from xain_wire.parameters import scheduler_pb2 as pb
from xain_wire.parameters.scheduler_pb2_grpc import SchedulerStub

TABLE = TableSpec(0, "w", 2, 1, True, "float32", Plugin("add"), Plugin("zeros"), (2, 1))
PATIENCE_S = 60.0


def declare(target: str, *tables: TableSpec) -> Counter[str]:
    """The statuses of declarations, made one after the other by no member of the group."""
    codes = Counter()
    with grpc.insecure_channel(target) as channel:
        stub = SchedulerStub(channel)
        for table in tables:
            try:
                stub.Declare(
                    pb.DeclareRequest(table=encoded(table), job="flood"), timeout=PATIENCE_S
                )
                codes["OK"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
    return codes


def test_declarations_over_the_bounds_harm_no_push_and_no_replica():
    """Pushes go on while servers die and others take their ranges, with the longest names there."""
    with LocalGroup(3, replicas=1) as group, group.connect(job="flood") as server:
        w = server.dense("w", (2,))
        w.push(np.ones(2, np.float32))
        wrong = [
            replace(TABLE, name="x" * 70_000),
            replace(TABLE, name=""),
            replace(TABLE, name="y", bound=10, shape=(3,)),
        ]
        assert declare(group.target, *wrong) == {"INVALID_ARGUMENT": 3}
        began = time.monotonic()
        many = [
            replace(TABLE, name=f"{n:0{MAX_NAME_BYTES}}") for n in range(3 * NEW_TABLES_AT_ONCE)
        ]
        codes = declare(group.target, *many)
        most = NEW_TABLES_AT_ONCE + NEW_TABLES_PER_S * (time.monotonic() - began)
        assert NEW_TABLES_AT_ONCE - 1 <= codes["OK"] <= most
        assert codes.keys() <= {"OK", "RESOURCE_EXHAUSTED"}
        later = server.dense("later", (2,))  # waits until another table may be declared
        later.push(np.ones(2, np.float32))
        scheduler = server._core.scheduler
        for dies in group.servers[:2]:
            wait_until(lambda: all(len(each.servers) == 2 for each in scheduler.view.ranges))
            dies.close()
            for table in (w, later):
                table.push(np.ones(2, np.float32))
        assert w.pull().tolist() == [3, 3]
        assert later.pull().tolist() == [3, 3]
        assert scheduler.status(PATIENCE_S).num_rollbacks == 0
