"""A minute on the device itself: what a micro-batch takes against what was predicted."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_fast.plan.measure import measure_update
from grpo_fast.plan.prediction import Calibration, Predictor
from grpo_fast.plan.setup import Setup, Workload
from grpo_fast.plan.traces import with_layers

LAYERS = 4  # of the model that is tried: its layers repeat
MOST_TOKENS = 4096


def calibrate(setup: Setup, work: Workload) -> Calibration:
    """Corrections for predictions of a setup, from an update of a few of its layers on the device at hand.

    What is there all the time is known exactly; the correction is for what comes and goes. On a GPU the
    bytes that the process takes beside torch's allocator are measured too.

    Args:
        setup: of the device at hand.
        work: completions are shortened to a micro-batch of 4096 tokens.

    Raises:
        ValueError: the setup is for a GPU, and there is none here.
        torch.OutOfMemoryError: not even this fits.
    """
    on_gpu = setup.device.kind == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(
            f"a calibration for {setup.device.name} needs it, and torch finds no CUDA device here"
        )
    config = with_layers(setup.config, min(LAYERS, setup.config.get_text_config().num_hidden_layers))
    sizes = _small(work)
    small = replace(setup, config=config)
    predictor = Predictor(small)
    predicted = predictor.predict(sizes)
    measured = measure_update(config, setup.model, sizes, attention=setup.attention, device=setup.device.kind)
    passing = predicted.passing("update")
    resident = predicted.allocated("update") - passing
    return Calibration(
        passing=(measured.peak - resident) / passing,
        context=_outside_the_allocator() if on_gpu else None,
    )


def _small(work: Workload) -> Workload:
    """One group of two in one micro-batch."""
    length = min(work.sequence_length, MOST_TOKENS // 2)
    prompt = max(1, length * work.prompt_length // work.sequence_length)
    completion = max(1, length - prompt)
    return Workload(1, 2, prompt, completion, micro_batch_tokens=MOST_TOKENS)


def _outside_the_allocator() -> int:
    """Bytes of this process' context and kernels."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
