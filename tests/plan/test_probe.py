from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.probe import calibrate
from grpo_fast.plan.setup import Workload

WORK = Workload(prompts=2, generations=4, prompt_length=60, completion_length=40, micro_batch_tokens=10**6)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prediction_that_holds_needs_no_correction(family: str, config: Any, setup: Any) -> None:
    found = calibrate(setup(config(family, num_hidden_layers=6, layer_types=None)), WORK)

    assert found.passing == pytest.approx(1, abs=0.05)
    assert found.context is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_a_gpu_that_is_not_there_cannot_be_measured(config: Any, setup: Any) -> None:
    elsewhere = replace(setup(config()), device=device_budget("H200"))

    with pytest.raises(ValueError, match="a calibration for H200 needs it"):
        calibrate(elsewhere, WORK)
