"""Our own engine draws completions of prompts with images, with the log-probabilities of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.data.config import DatasetConfig
from grpo_fast.data.dataset import prompts_of
from grpo_fast.data.images import ImageReader
from grpo_fast.policy import load_policy, pack
from grpo_fast.policy.config import ModelConfig
from grpo_fast.rollout import make_engine
from grpo_fast.rollout.config import RolloutConfig
from grpo_fast.rollout.types import Sampling, generate_rollout
from grpo_fast.table import Completions
from tests.vision_models import CONFIGS, OfGemma4, picture, save_vision_model


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_completions_have_the_logprobs_that_the_trainer_computes(kind: str, tmp_path: Path) -> None:
    policy = load_policy(
        ModelConfig(path=str(save_vision_model(tmp_path, kind)), dtype="float32", device="cpu")
    )
    if kind == "gemma4":
        policy.tokenizer.images = ImageReader(lambda: OfGemma4(tmp_path))
    rows: list[dict[str, Any]] = [
        {"prompt": "how many", "images": [picture(64, 64), picture(90, 40)]},
        {"prompt": "how many shapes", "image": picture(40, 64)},
        {"prompt": "how many shapes", "image": picture(40, 64)},
        {"prompt": "how many shapes", "image": None},
    ]
    dataset = prompts_of(rows, DatasetConfig(source="rows"), policy.tokenizer)
    with make_engine(RolloutConfig(engine="transformers"), policy, max_length=64) as engine:
        groups = generate_rollout(engine, dataset, 3, Sampling(max_completion_length=12))
    drawn = [completion for group in groups for completion in group]
    owners = [owner for owner in range(4) for _ in range(3)]
    table = Completions.of(
        [dataset[owner].token_ids for owner in owners],
        [completion.token_ids for completion in drawn],
        owners,
        objects={"images": [dataset[owner].images for owner in owners]},
    )
    (batch,) = pack(table, max_tokens=10_000, device="cpu")
    found = torch.zeros(len(table.token_ids))
    logprobs = policy.head.logits(policy.hidden_states(batch)).log_softmax(-1)
    found[batch.token_index] = logprobs.gather(1, batch.targets[:, None])[:, 0].detach()
    told = torch.tensor([number for completion in drawn for number in completion.logprobs or ()])
    torch.testing.assert_close(found, told, atol=1e-5, rtol=0)
