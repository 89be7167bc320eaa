"""Updates of one rank and of several: `python update_worker.py FOLDER RANKS`, the toy in FOLDER.

One process imports what takes seconds, and forks.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from fork import fork

from grpo_fast.config import TrainConfig
from grpo_fast.distributed.world import ALONE, World
from grpo_fast.experience import make_samples
from grpo_fast.run import build_trainer
from grpo_fast.run_record.logs import Clock
from grpo_fast.trainer import Trainer

# Adam's steps along gradients that are mere rounding are of full size, unless eps exceeds them.
ADAM = {"eps": 1e-4, "learning_rate": 3e-3, "weight_decay": 0.1}
EPOCHS = {"num_iterations": 2, "minibatches": 2}
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"optimizer": ADAM | {"max_grad_norm": 0.05}, "micro_batch_tokens": 24},
    "lora": {"model": {"lora": {"r": 4}}, "loss": {"beta": 0.05}},
    "frozen head": {"model": {"train_lm_head": False}, **EPOCHS, "loss": {"loss_type": "gspo"}},
    "penalised": {"loss": {"beta": 0.1, "kl_in_reward": True}},
    "reference": {"loss": {"beta": 0.1, "loss_type": "grpo"}, **EPOCHS, "micro_batch_tokens": 48},
    "chosen": {"loss": {"loss_type": "kl_cov", "kl_cov_ratio": 0.1, "top_entropy_quantile": 0.7}, **EPOCHS},
    "drawn": {"loss": {"loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_low": 0.0}, **EPOCHS},
    "one": {"advantage": {"skip_flat_groups": False}},  # sample alone: the other ranks have none
}


def check(name: str, toy: dict[str, Any], world: World) -> None:
    """Two updates of one rollout, which every rank has collected by itself, and their metrics."""
    seed = random.Random(f"{name} {toy['seed']}").randrange(2**31)
    merged = {k: {**toy.get(k, {}), **v} if isinstance(v, dict) else v for k, v in CASES[name].items()}
    config = TrainConfig.model_validate(toy | {"optimizer": ADAM, "seed": seed} | merged)
    alone, several = (build_trainer(config, w) for w in (ALONE, world))
    assert isinstance(alone, Trainer) and isinstance(several, Trainer)
    groups, _ = alone.collect(Clock())
    samples, totals = make_samples(groups, config.advantage, config.loss)
    samples = samples[: 1 if name == "one" else 23]
    found = []
    for trainer in (alone, several):
        metrics: dict[str, float] = {}
        for _ in range(2):
            torch.manual_seed(seed)  # clip_cov draws
            metrics = trainer.update.run(samples, totals, Clock())
        if config.loss.kl_in_reward:
            metrics["penalties"] = trainer.update.kl_penalties(samples).square().sum().item()
        found.append(metrics)
    pairs = zip(alone.policy.trainable().items(), several.policy.trainable().values(), strict=True)
    for (key, one), two in pairs:
        error = (one - two).norm() / one.norm().clamp(min=1e-3)
        assert error < 1e-6, f"{name}, seed {seed}: {key} differs by {error:.1e}"
    assert found[0].keys() == found[1].keys(), f"{name}: {found[0].keys() ^ found[1].keys()}"
    for key, value in found[0].items():
        same = found[1][key] == value or abs(found[1][key] - value) <= 1e-5 * max(1, abs(value))
        assert same, f"{name}, seed {seed}: {key} is {found[1][key]}, alone {value}"


def main(world: World, folder: str) -> None:
    toy = json.loads((Path(folder) / "toy.json").read_text())
    for name in CASES:
        check(name, toy, world)


if __name__ == "__main__":
    fork(main, int(sys.argv[2]), sys.argv[1])
