from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_fast.plan.measure import peak_bytes
from grpo_fast.plan.model_shape import BLOCK_TOKENS, model_shape, skeleton
from grpo_fast.plan.prediction import Predictor
from grpo_fast.plan.rollout import in_flight, paged_kv_bytes, transformers_kv_bytes
from grpo_fast.plan.setup import Workload
from grpo_fast.rollout.decoder import ExpandedDecoder, SharedPrefixDecoder

WORK = Workload(prompts=3, generations=4, prompt_length=18, completion_length=32, micro_batch_tokens=10**6)


def decode(model: torch.nn.Module, work: Workload) -> int:
    """Bytes of keys and values when every completion is as long as it may be."""
    kind = SharedPrefixDecoder if SharedPrefixDecoder.supports(model) else ExpandedDecoder
    decoder = kind(model, work.completion_length)
    model.set_attn_implementation(decoder.attention)
    prompts = [[1 + number] * work.prompt_length for number in range(work.prompts)]
    with torch.no_grad():
        decoder.prefill(prompts, torch.arange(work.prompts).repeat_interleave(work.generations))
        for _ in range(work.completion_length):
            decoder.step(torch.ones(work.completions, dtype=torch.int64))
    return decoder.memory()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "gemma3_text"])
def test_keys_and_values_are_what_the_engine_holds(family: str, dtype: str, config: Any, setup: Any) -> None:
    planned = setup(config(family), dtype=dtype)
    shape = model_shape(skeleton(planned.config, planned.model))
    model = AutoModelForCausalLM.from_config(planned.config, dtype=planned.dtype).eval()

    held = decode(model, WORK)

    growing = transformers_kv_bytes(planned, shape, WORK, WORK.prompts, WORK.completions)
    assert held <= growing <= 1.25 * held  # of one layer, a copy while it grows; windows keep a token less


def test_decoding_takes_what_was_predicted(config: Any, setup: Any) -> None:
    planned = setup(config("qwen2"))
    predictor = Predictor(planned)
    prediction = predictor.predict(WORK)
    parts = prediction.parts["rollout"]

    def prepare() -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(planned.config, dtype=planned.dtype).eval()

    measured = peak_bytes(prepare, lambda model: decode(model, WORK), torch.device("cpu"))

    assert measured <= 1.05 * sum(parts[name] for name in ("weights", "KV cache", "engine workspace"))


def test_a_cpu_decodes_in_batches(config: Any, setup: Any) -> None:
    planned = setup(config())
    shape = model_shape(skeleton(planned.config, planned.model))
    many = replace(WORK, prompts=64, completion_length=512)

    prompts, rows = in_flight(planned, shape, many)

    held = prompts * many.prompt_length + rows * many.completion_length
    assert held <= 2**14 < held + many.completion_length + many.prompt_length
    assert in_flight(replace(planned, max_batch_tokens=10**6), shape, many) == (64, 256)


def test_a_group_shares_the_full_pages_of_its_prompt(config: Any, setup: Any) -> None:
    planned = setup(config(), dtype="bfloat16")
    shape = model_shape(skeleton(planned.config, planned.model))
    page = BLOCK_TOKENS * shape.paged_kv_bytes_per_token

    # A prompt of 18 tokens fills one page; 18 + 32 tokens take four, so each completion three of its own.
    assert paged_kv_bytes(shape, WORK) == (3 * (1 + 4 * 3) + 1) * page
