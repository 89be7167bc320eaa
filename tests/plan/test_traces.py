from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grpo_fast.plan.activations import update_run
from grpo_fast.plan.model_shape import skeleton
from grpo_fast.plan.timeline import Event, Irregular, Timeline, repeated
from grpo_fast.plan.traces import Traces, with_layers
from grpo_fast.policy.config import LoraConfig

CHECKPOINTED, ADAPTED = {"gradient_checkpointing": True}, {"lora": LoraConfig(r=4)}


@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen2", {}), ("qwen2", CHECKPOINTED), ("qwen2", ADAPTED), ("gpt_neox", {}), ("qwen3_moe", {})],
    ids=str,
)
def test_a_few_layers_tell_what_all_of_them_do(
    family: str, way: dict[str, Any], config: Any, setup: Any
) -> None:
    model = setup(config(family), dtype="bfloat16", **way).model
    deep = config(family, num_hidden_layers=7)

    found = Traces(deep).of(model).update("sdpa", masked=True, first=False)

    whole = Timeline.fit(update_run(skeleton(deep, model), "sdpa", masked=True, first=False))
    sizes = (1000, 800, {"mask": 50_000, "head_kept": 7, "head_forward": 11, "head_backward": 13})
    np.testing.assert_array_equal(found.live(*sizes), whole.live(*sizes))
    assert found.forward_end == whole.forward_end


def test_layers_of_several_kinds_are_all_run(config: Any, setup: Any) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    deep = config("gemma3_text", num_hidden_layers=6, layer_types=kinds)
    model = setup(deep).model

    found = Traces(deep).of(model).update("sdpa", masked=False, first=False)

    whole = Timeline.fit(update_run(skeleton(deep, model), "sdpa", masked=False, first=False))
    np.testing.assert_array_equal(found.live(100, 80, {}), whole.live(100, 80, {}))


def test_a_layer_more_that_is_no_block_is_noticed() -> None:
    def run(*sizes: int) -> Any:
        return lambda tokens, targets: ([Event(1, size) for size in sizes], len(sizes))

    assert len(repeated(run(1, 5, 2), run(1, 5, 5, 2), 3)(0, 0)[0]) == 6
    with pytest.raises(Irregular):
        repeated(run(1, 5, 2), run(1, 7, 5, 9, 2), 3)(0, 0)


def test_fewer_layers_keep_their_kinds(config: Any) -> None:
    short = with_layers(config("gemma3_text"), 2)

    assert (short.num_hidden_layers, short.layer_types) == (2, ["sliding_attention"] * 2)
