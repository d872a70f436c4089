"""Stages on GPUs, where there are any."""

import numpy as np
import pytest
import torch

from xain_participant.sdk.participant import Assignment, ProcessGroup
from xain_participant.stages.stage_trainer import StageTrainer
from xain_workloads.errors import DataError
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.tables.data import load


def test_stage_is_trained_on_the_gpu_where_there_is_one():
    """A GPU gives the weights of the CPU but for rounding. Without one `device = "cuda"` is
    refused."""
    data = load("iris")
    trainer = StageTrainer("127.0.0.1")

    def trained(attempt: int, device: str) -> np.ndarray:
        options = {"mode": "pipeline", "learning_rate": 0.01, "device": device}
        model = NeuralWorkload.from_options(options).initial_model([data.profile()])
        group = ProcessGroup(attempt, 0, 1, trainer.address)
        assignment = Assignment("s1", 0, process_group=group)
        return trainer.train(assignment, model, data, epochs=1, epoch_base=0).vector

    try:
        if not torch.cuda.is_available():
            with pytest.raises(DataError, match=r'device is "cuda", .*every participant'):
                trained(1, "cuda")
            pytest.skip("torch finds no GPU on this machine")
        np.testing.assert_allclose(trained(1, "cuda"), trained(2, "cpu"), atol=1e-4)
    finally:
        trainer.end()
