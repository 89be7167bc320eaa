"""Whether the head is right on this device at the sizes it is used at: look here before any time is believed.

Every implementation of ours runs forward and backward on every loss, against the oracle in float64: a minute
on a GPU, with the first compilation. A result that is off by more than rounding explains fails.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from .conftest import DTYPE, ON_GPU
from .oracle import consult, require_right
from .peers import ours
from .problem import CROSS_ENTROPY, FORWARD_BACKWARD, GRPO, Setting, call
from .rows import make_problem

SIZES_OF = {  # rows, N, H, V; the last has rows that no tensor descriptor addresses, and a ragged vocabulary
    True: (
        ("histogram", 16_384, 2048, 151_936),
        ("peaked", 8192, 4096, 128_256),
        ("flat", 4096, 896, 151_936),
        ("peaked", 2047, 1004, 50_257),
    ),
    False: (("histogram", 64, 64, 2048), ("peaked", 64, 96, 1000), ("flat", 63, 20, 301)),
}
TRAINED = [Setting(*sizes, FORWARD_BACKWARD, True, "float32") for sizes in SIZES_OF[ON_GPU]]
SETTINGS = [of for setting in TRAINED for of in (setting, replace(setting, trainable=False))]
SETTINGS += [replace(TRAINED[0], loss=loss) for loss in (GRPO, CROSS_ENTROPY)]
AXES = {"dtype": [DTYPE], "peer": [peer.name for peer in ours.PEERS]}
_GRADIENT = {"float32": 5e-3, "bfloat16": 8e-3, "float16": 8e-3}
"""Several times what rounding gradients to half precision and the default tolerance cost together."""


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda of: f"{of.rows}-{of.loss}-{of.trainable}")
def test_accuracy(peer, setting, dtype, device, seed):
    problem = make_problem(replace(setting, dtype=dtype), device, seed)
    run = next(one.prepare for one in ours.PEERS if one.name == peer)(problem)
    limits = {
        "logprob": 1e-4,
        "loss": 1e-4,
        **dict.fromkeys(("hidden_gradient", "weight_gradient"), _GRADIENT[dtype]),
    }
    require_right(consult(problem).judge(problem, call(run, problem)), limits)
