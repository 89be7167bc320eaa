"""The largest group whose update fits, found by trying.

A group is one prompt with n completions of full length, in one forward and backward. Each try is two updates
in a new process: n doubles until memory runs out, then the interval is halved. Bytes are those of model,
optimizer and update. On a CPU `memory` limits the growth of the process, libraries included.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from grpo_fast.config.policy import ModelConfig

from . import measure, updates
from .conftest import DEADLINE, DTYPE, ON_GPU
from .models import ARCHITECTURES, config_of

AXES = {
    "model": ("Qwen2.5-1.5B", "Qwen2.5-0.5B") if ON_GPU else ("SmolLM2-135M",),
    "dtype": [DTYPE],
    "peer": updates.IMPLEMENTATIONS,
}
ALLOWED = {"model": ARCHITECTURES}
SIZES = {  # on a GPU, on a CPU
    "layers": (0, 1),  # of the model at most; 0: all
    "prompt": (128, 16),  # tokens
    "completion": (1024, 32),  # tokens
    "largest": (1 << 16, 32),  # group to try at most
    "memory": (0, 0.75),  # GiB; 0: all of the GPU
}
_TRY_SECONDS = 300.0


@dataclass(frozen=True)
class Probe:
    """`size` completions of `completion` tokens for one prompt, in one forward and backward."""

    implementation: str
    model: ModelConfig
    layers: int | None  # at most
    prompt: int  # tokens
    completion: int
    budget: int  # bytes beyond what the libraries take
    size: int = 0


def run_probe(probe: Probe) -> int | None:
    """Try one size; return its peak bytes, or None where memory runs out."""
    device = torch.device(probe.model.device)
    try:
        allocated, grown = measure.in_a_process(device, _try, probe, seconds=_TRY_SECONDS)
    except measure.Failure as failure:
        if failure.args[0] == measure.OOM:
            return None
        raise
    peak = grown if allocated is None else allocated
    return peak if peak <= probe.budget else None


def _try(probe: Probe) -> int | None:
    """Update twice, since Adam allocates its moments in the first; return torch's peak on a GPU."""
    device = torch.device(probe.model.device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, probe.budget / total), device)
    lengths = [(probe.prompt, probe.completion)] * probe.size
    update = updates.Update(probe.model, probe.layers, lengths, probe.size, sum(map(sum, lengths)))
    prepared = updates.PREPARE[probe.implementation](update)
    for _ in range(2):
        prepared.run()
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def search(probe: Probe, largest: int, deadline: float) -> tuple[int, int, str]:
    """Double the group until memory runs out, then halve the interval; begin no try after the deadline.

    Returns:
        The largest group that fits, its peak bytes, and a remark where the next larger was not tried.

    Raises:
        Failure: not even two fit, a try failed for another reason, or there was no time for one.
    """
    fits, peak, fails = 1, 0, None
    while time.monotonic() < deadline:
        size = min(largest, 2 * fits) if fails is None else (fits + fails) // 2
        if size == fits:
            break
        found = run_probe(replace(probe, size=size))
        fits, peak, fails = (fits, peak, size) if found is None else (size, found, fails)
    if fits == 1 and fails:
        raise measure.Failure(measure.OOM, "not even two fit")
    if fits == 1:
        raise measure.Failure(measure.SKIPPED, measure.NO_TIME)
    return fits, peak, "" if fails == fits + 1 else "at least: the next size was not tried"


def test_group(peer, model, dtype, sizes, device, benchmark, pytestconfig):
    measure.preload(__name__, "trl.trainer.grpo_trainer")  # so that no try grows by what it imports
    memory = sizes.get("memory") or torch.cuda.get_device_properties(device).total_memory / 2**30
    config, tokens = config_of(model, dtype, device), (sizes["prompt"], sizes["completion"])
    probe = Probe(peer, config, sizes.get("layers"), *tokens, budget=int(memory * 2**30))
    given = probe, sizes["largest"], pytestconfig.stash[DEADLINE]
    fits, peak, remark = benchmark.pedantic(search, args=given)
    benchmark.extra_info |= {"largest_group": fits, "peak_bytes": peak, "remark": remark}
