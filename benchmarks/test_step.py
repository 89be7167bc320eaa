"""One policy update of a real architecture, phase by phase, ours and TRL's."""

from __future__ import annotations

from functools import cache

import pytest

from .conftest import DTYPE, ON_GPU, chosen
from .models import ARCHITECTURES, config_of, draw_lengths
from .updates import IMPLEMENTATIONS, PREPARE, TRL, Update

AXES = {
    "model": ("Qwen2.5-1.5B", "Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B") if ON_GPU else ("SmolLM2-135M",),
    "dtype": [DTYPE],
    "peer": IMPLEMENTATIONS,
}
ALLOWED = {"model": ARCHITECTURES}
SIZES = {  # on a GPU, on a CPU
    "layers": (0, 2),  # of the model at most; 0: all
    "prompts": (16, 1),
    "group": (16, 4),  # completions a prompt
    "micro_batch_tokens": (16_384, 512),  # of a forward and backward
}


@pytest.fixture(scope="module")
def prepared(model, dtype, device, sizes, seed):
    """Prepare an implementation once; all share one model."""
    lengths = draw_lengths(sizes["prompts"], sizes["group"], seed)
    given = lengths, sizes["group"], sizes["micro_batch_tokens"], seed
    update = Update(config_of(model, dtype, device), sizes.get("layers"), *given)
    return cache(lambda name: PREPARE[name](update))


def test_step(peer, prepared, peak_memory, in_turns, benchmark, pytestconfig):
    mine, reference = prepared(peer), None
    if peer != TRL and TRL in chosen(pytestconfig, IMPLEMENTATIONS):
        reference = prepared(TRL).run
    mine.run()
    peak_memory(mine.run)
    in_turns(mine.run, reference, TRL, mine.watch)
    last = dict(mine.last)
    benchmark.extra_info |= {"tokens": last.pop("tokens"), "metrics": last}
