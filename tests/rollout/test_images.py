"""Completions of prompts with images have the log-probabilities of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import RolloutConfig, VLLMConfig
from grpo_fast.data.dataset import PromptDataset, prompts_of
from grpo_fast.data.images import ImageReader
from grpo_fast.data.table import CompletionTable
from grpo_fast.policy import Policy, load_policy, pack
from grpo_fast.rollout import Engine, make_engine
from grpo_fast.rollout.types import Sampling, generate_rollout
from grpo_fast.rollout.vllm import settings
from grpo_fast.rollout.vllm.settings import require_vision
from tests.vision_models import CONFIGS, OfGemma4, picture, save_vision_model


def agree(
    policy: Policy,
    engine: Engine,
    dataset: PromptDataset,
    nats: float,
    of: Callable[[Tensor], Tensor] = torch.max,
) -> None:
    """Check that log-probabilities of engine and trainer differ by at most `nats`."""
    groups = generate_rollout(engine, dataset, 3, Sampling(max_completion_length=12))
    sampled = [completion for group in groups for completion in group]
    owners = [owner for owner in range(len(dataset)) for _ in range(3)]
    table = CompletionTable.of(
        [dataset[owner].token_ids for owner in owners],
        [completion.token_ids for completion in sampled],
        owners,
        objects={"images": [dataset[owner].images for owner in owners]},
    )
    (batch,) = pack(table, max_tokens=10_000, device="cpu")
    found = torch.zeros(len(table.token_ids))
    logprobs = policy.head.logits(policy.hidden_states(batch)).log_softmax(-1)
    found[batch.token_index] = logprobs.gather(1, batch.targets[:, None])[:, 0].detach()
    reported = torch.tensor([number for completion in sampled for number in completion.logprobs or ()])
    assert len(reported) and float(of((found - reported).abs())) <= nats


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_completions_have_the_logprobs_that_the_trainer_computes(kind: str, tmp_path: Path) -> None:
    policy = load_policy(
        ModelConfig(path=str(save_vision_model(tmp_path, kind)), dtype="float32", device="cpu")
    )
    if kind == "gemma4":
        policy.image_reader = ImageReader(lambda: OfGemma4(tmp_path))
    rows: list[dict[str, Any]] = [
        {"prompt": "how many", "images": [picture(64, 64), picture(90, 40)]},
        {"prompt": "how many shapes", "image": picture(40, 64)},
        {"prompt": "how many shapes", "image": picture(40, 64)},
        {"prompt": "how many shapes", "image": None},
    ]
    dataset = prompts_of(rows, DatasetConfig(source="rows"), policy.tokenizer, images=policy.image_reader)
    with make_engine(RolloutConfig(engine="transformers"), policy, max_length=64) as engine:
        agree(policy, engine, dataset, 1e-5)


WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("kind", "text", "nats", "of"),
    [
        ("qwen2_5_vl", {}, 1e-4, torch.max),
        ("qwen3_vl", {}, 1e-4, torch.max),
        ("qwen3_vl_moe", {}, 1e-4, torch.max),
        # In bfloat16, the one that vLLM's kernels on a CPU have: some token goes to other experts.
        ("qwen3_5", WIDE, 0.05, torch.median),
        ("qwen3_5_moe", WIDE, 0.05, torch.median),
    ],
)
def test_vllm_sees_the_same_images_before_and_after_a_sync(
    kind: str, text: dict[str, Any], nats: float, of: Any, tmp_path: Path, on_vllms_cpu: None
) -> None:
    for needed in ("torchvision", "blake3"):  # which vLLM asks for when it reads images
        pytest.importorskip(needed)
    heads = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}  # that its kernels have
    folder, dtype = (
        save_vision_model(tmp_path, kind, **heads, **text),
        "float32" if nats < 0.01 else "bfloat16",
    )
    policy = load_policy(ModelConfig(path=str(folder), dtype=dtype, device="cpu"))
    rows = [{"prompt": "how many", "image": picture(64, 64)} for _ in range(2)]
    dataset = prompts_of(rows, DatasetConfig(source="rows"), policy.tokenizer, images=policy.image_reader)
    config = RolloutConfig(engine="vllm", vllm=VLLMConfig(kv_cache_gib=0.05))
    with make_engine(config, policy, max_length=128) as engine:
        agree(policy, engine, dataset, nats, of)
        with torch.no_grad():
            for weight in policy.trainable().values():
                weight.add_(0.02 * torch.randn_like(weight))
        engine.sleep()
        engine.sync(policy)
        engine.wake()
        agree(policy, engine, dataset, nats, of)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_on_a_cpu_vllm_is_not_given_images_whose_tokens_see_each_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = AutoConfig.from_pretrained(save_vision_model(tmp_path, kind))
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"torchvision .* type gemma\d"):
        require_vision(architecture, on_gpu=True, images=False)
    monkeypatch.setattr(settings, "find_spec", lambda name: name)
    require_vision(architecture, on_gpu=False, images=False)
    require_vision(architecture, on_gpu=True, images=True)
    with pytest.raises(ValueError, match=r"gemma\d in both directions: set rollout\.engine"):
        require_vision(architecture, on_gpu=False, images=True)
