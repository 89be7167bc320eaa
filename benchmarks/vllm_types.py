"""`python -m benchmarks vllm`: what vLLM draws from each type of model, against the policy's own forward.

A tiny random model of each in float32, wide enough for vLLM's kernels on a CPU: at the start, after a sync
of all weights, after one of LoRA merged, and from its export, which vLLM loads by itself. A refusal is told
in its own words.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from grpo_fast.config.policy import LoraConfig, ModelConfig
from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.policy import Policy, load_policy
from grpo_fast.policy.architecture import rounding_nats
from grpo_fast.rollout import Completion, Sampling
from grpo_fast.rollout.vllm import installed_version

from .models import make_tokenizer
from .tiny import VOCABULARY, tiny_config, tiny_model
from .type_table import Measures, Row, TypeTable, fill, furthest, words

KINDS = (
    *("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "granitemoe", "glm4_moe", "ernie4_5_moe", "minimax_m2"),
    *("gpt_oss", "phimoe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2"),
)
_CHOSEN = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1}
_YARN: dict[str, Any] = {
    "head_dim": 64,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    },
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 32},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "lm_head_bias": True},
    "deepseek_v2": _YARN,
    "deepseek_v3": _CHOSEN | _YARN,
    "glm4_moe_lite": _CHOSEN | {"head_dim": 64},
    "lfm2": {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128},
}
"""What vLLM reads of the published configurations, and transformers leaves out of its own."""
COLUMNS = {
    "start": "at the start",
    "synced": "after a sync",
    "merged": "LoRA merged",
    "exported": "exported",
}  # of all completions the nats of the token furthest apart
TABLE = TypeTable(
    "vllm_types",
    {"way": "weights", **COLUMNS},
    dict.fromkeys(COLUMNS, rounding_nats(torch.float32, "cpu")),
    seconds=600,
    words={"portable": "reloaded", "direct": "copied"},  # the way that all weights take
)
PROMPTS = ((5, 6, 7), (8, 9, 10, 11, 12), tuple(3 + i % 26 for i in range(70)))
SAMPLING = Sampling(max_completion_length=20, seed=11)
STEP = 0.02  # of what a weight is shaken by


def check(kind: str, seed: int = 0, parts: Sequence[str] = ("start", "merged", "exported")) -> Row:
    """One type, in this process, in which vLLM starts once for each part; `start` measures a sync, too."""
    row = TABLE.row(kind)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _save(kind, folder, seed)
            make_tokenizer(VOCABULARY).save_pretrained(folder)
        except Exception as error:
            return row | {"reasons": {"built": words(error)}}
        measures: dict[str, Measures] = {
            "start": lambda: _trained(folder),
            "merged": lambda: {"merged": _adapted(folder)},
            "exported": lambda: {"exported": _served(folder)},
        }
        return fill(row, {column: measures[column] for column in parts})


def _save(kind: str, folder: str, seed: int) -> None:
    published = PUBLISHED.get(kind, {})
    config = tiny_config(kind, wide=True)
    config.update(published)
    tiny_model(config, seed).save_pretrained(folder)
    config.update(published)  # which had transformers' name of the architecture
    config.save_pretrained(folder)


def _policy(folder: str, **settings: Any) -> Policy:
    return load_policy(ModelConfig(path=folder, dtype="float32", device="cpu", **settings))


def _engine(policy: Policy) -> Any:
    from grpo_fast.rollout.vllm.engine import VLLMEngine

    return VLLMEngine(policy, VLLMConfig(kv_cache_gib=0.05), max_length=128)


@torch.no_grad()
def _shake(policy: Policy, scale: float) -> None:
    """A step in any direction."""
    for parameter in policy.trainable().values():
        parameter.add_(torch.randn_like(parameter), alpha=scale)


def _trained(folder: str) -> dict[str, Any]:
    policy = _policy(folder)
    with _engine(policy) as engine:
        start = _apart(policy, engine)
        _shake(policy, STEP)
        engine.sync(policy)
        return {"way": engine._sync.way, "start": start, "synced": _apart(policy, engine)}


def _adapted(folder: str) -> float:
    policy = _policy(folder, lora=LoraConfig(r=4))
    with _engine(policy) as engine:
        _shake(policy, 5 * STEP)
        engine.sync(policy)
        return _apart(policy, engine)


def _served(folder: str) -> float:
    """An export with LoRA merged, by a vLLM that knows the folder alone."""
    from grpo_fast.rollout.vllm.start import starting, stopped

    policy = _policy(folder, lora=LoraConfig(r=4))
    _shake(policy, 5 * STEP)
    policy.save_pretrained(f"{folder}/merged")
    with starting():
        from vllm import LLM, SamplingParams

        sizes = {"max_model_len": 128, "kv_cache_memory_bytes": 50 << 20}
        served = LLM(f"{folder}/merged", dtype="float32", enforce_eager=True, **sizes)
        wanted = SamplingParams(n=3, max_tokens=20, logprobs=0, seed=11, flat_logprobs=True)
        found = served.generate([{"prompt_token_ids": [*prompt]} for prompt in PROMPTS], wanted)
    served.llm_engine.engine_core.shutdown()
    stopped()
    groups = [
        [Completion((*o.token_ids,), (*o.logprobs.logprobs,), o.text, False) for o in one.outputs]
        for one in found
    ]
    return furthest(policy.model, PROMPTS, groups)


def _apart(policy: Policy, engine: Any) -> float:
    return furthest(policy.model, PROMPTS, engine.generate(PROMPTS, 3, SAMPLING))


add_arguments = TABLE.add_arguments


def main(options: argparse.Namespace) -> int:
    rows = TABLE.measure(check, KINDS, options, vllm=installed_version())
    return int(any(map(TABLE.wrong, rows)))
