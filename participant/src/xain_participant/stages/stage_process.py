"""The process that trains stages for a participant, a child.py: it ends with the participant.

It gets jobs through a descriptor and answers each with a StageResult or an exception.
"""

import signal
import sys
import traceback
from multiprocessing.connection import Connection

from xain_foundation.logs import streams
from xain_participant.sdk.participant import GroupBroken
from xain_participant.stages.process_groups import open_group
from xain_participant.stages.stage_trainer import Job, portable
from xain_workloads.errors import DataError, WorkloadError
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.nets.neural_builders import allow_builders
from xain_workloads.nets.pipeline import StageResult, train_stage
from xain_workloads.nets.threads import use_threads
from xain_workloads.tables.dataset import Dataset
from xain_workloads.workload import from_metadata


def main(connection: Connection) -> None:
    """Train the jobs of the participant one after the other, until it closes the connection."""
    streams.unblock()
    # Ctrl-C reaches all processes of a terminal, and the participant decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path, builders, num_threads = connection.recv()
    sys.path[:] = path
    allow_builders(builders)
    if num_threads is not None:
        use_threads(num_threads)
    data: Dataset | None = None
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        data = data if job.data is None else job.data
        assert data is not None, "the first job has data"
        try:
            answer: StageResult | Exception = _train(job, data)
        except Exception as error:  # of the workload; it is the answer
            if not isinstance(error, WorkloadError | GroupBroken):
                traceback.print_exc()
            answer = portable(error)
        connection.send(answer)


def _train(job: Job, data: Dataset) -> StageResult:
    """Train the stage of a job in its process group. Raises GroupBroken, DataError and what
    training raises."""
    workload = from_metadata(job.model.metadata)
    assert isinstance(workload, NeuralWorkload), "the participant has looked"
    with open_group(job.member) as members:
        if workload.options.device == "cuda" and members.device.type != "cuda":
            raise DataError(
                'device is "cuda", and not every participant has a GPU of its own; set it to "auto"'
            )
        return train_stage(
            workload, job.model, data, members, epochs=job.epochs, epoch_base=job.epoch_base
        )


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
