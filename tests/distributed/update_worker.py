"""Updates of one rank and of two: `python update_worker.py FOLDER`, with toy.json in FOLDER.

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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_fast.config.schema import TrainConfig
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.loop.collect import to_train
from grpo_fast.loop.trainer import Trainer
from grpo_fast.objective import GRPOLossConfig, LossInputs, LossOutputs, policy_loss
from grpo_fast.policy import optimizer as optimizer_module
from grpo_fast.record.logs import Clock
from grpo_fast.run import build_trainer

# Adam's steps along gradients that are mere rounding are of full size, unless eps exceeds them.
ADAM = {"eps": 1e-4, "learning_rate": 3e-3, "weight_decay": 0.1}
EPOCHS = {"num_iterations": 2, "minibatches": 2}
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"optimizer": ADAM | {"max_grad_norm": 0.05}, "micro_batch_tokens": 24},
    # Of a rate at which the adapters' product does not outgrow the weight by whose size errors are measured.
    "lora": {
        "model": {"lora": {"r": 4}},
        "loss": {"beta": 0.05, "kl_in_reward": True},
        "optimizer": ADAM | {"learning_rate": 3e-4},
    },
    "frozen head": {"model": {"train_lm_head": False}, **EPOCHS, "loss": {"loss_type": "gspo"}},
    # Groups that share a baseline are of one rank, whatever the packing of either.
    "groups": {
        "groups": {"strategy": "similarity", "similarity_threshold": 0.01, "max_group_size": 2},
        "loss": {"loss_type": "update_worker:alike_in_groups"},
        "micro_batch_tokens": 24,
        "minibatches": 2,
    },
    "reference": {"loss": {"beta": 0.1}, "micro_batch_tokens": 48, **EPOCHS},
}


def alike_in_groups(inputs: LossInputs) -> LossOutputs:
    """DAPO's loss, and the variance of log-probabilities within a group, a mean over the step's groups."""
    out = policy_loss(inputs, GRPOLossConfig("dapo"))
    groups = inputs.groups
    deviations = inputs.logprobs - groups.spread(groups.mean(inputs.logprobs))
    variance = groups.mean(deviations.square()).sum() / inputs.totals.num_groups
    return LossOutputs(out.loss + variance, out.metrics | {"variance": variance.detach()})


def check(name: str, toy: dict[str, Any], untied: str, world: World) -> None:
    """Updates of one rollout, which every rank has collected by itself, and their metrics."""
    draw = random.Random(f"{name} {toy['seed']}")
    seed, path = draw.randrange(2**31), draw.choice([toy["model"]["path"], untied])
    ours = toy | {"seed": seed, "optimizer": ADAM, "model": toy["model"] | {"path": path}}
    merged = {k: {**ours.get(k, {}), **v} if isinstance(v, dict) else v for k, v in CASES[name].items()}
    settings = ours | merged
    modes = [{"mode": "replicate"}, {"mode": "shard"}]
    alone, *several = (
        build_trainer(TrainConfig.model_validate(settings | {"distributed": mode}), ranks)
        for mode, ranks in [({}, SINGLE_PROCESS), *((mode, world) for mode in modes)]
    )
    assert isinstance(alone, Trainer)
    config = alone.config
    table, _ = alone.collect(Clock())
    samples, totals = to_train(table, config.advantage, config.loss)
    samples = samples[:23]
    if not samples.columns["advantages"].any():  # equal rewards, which would move nothing
        drawn = torch.tensor([draw.uniform(-1, 1) for _ in range(len(samples))])
        samples = samples.with_columns(advantages=samples.spread(drawn))
    weights, found = [], []
    for trainer in (alone, *several):
        assert isinstance(trainer, Trainer)
        metrics = trainer.update.run(samples, totals, Clock())
        if name == "clipped":
            metrics = trainer.update.run(samples[:1], totals, Clock())  # other ranks have none
        if config.loss.kl_in_reward:
            metrics["penalties"] = trainer.update.kl_penalties(samples).square().sum().item()
        found.append(metrics)
        weights.append({key: weight.clone() for key, weight in trainer.policy.named_weights()})
    for mode, own, told in zip(modes, weights[1:], found[1:], strict=True):
        case = f"{name}, {path}, {mode}, seed {toy['seed']}"
        assert own.keys() == weights[0].keys(), case
        apart = {k: float((w - own[k]).norm() / w.norm().clamp(min=1e-3)) for k, w in weights[0].items()}
        worst = max(apart, key=apart.__getitem__)
        assert apart[worst] < 1e-6, f"{case}: {worst} differs by {apart[worst]:.1e}"
        assert told.keys() == found[0].keys(), f"{case}: {told.keys() ^ found[0].keys()}"
        for key, value in found[0].items():
            same = told[key] == value or abs(told[key] - value) <= 1e-5 * max(1, abs(value))
            assert same, f"{case}: {key} is {told[key]}, alone {value}"


def check_balance(toy: dict[str, Any], mixture: str, world: World) -> None:
    """Compare the load-balancing loss of a mixture between replicated and sharded ranks."""
    model = toy["model"] | {"path": mixture, "router_aux_loss": 0.5}
    settings = toy | {"model": model, "optimizer": ADAM, "micro_batch_tokens": 48}
    modes = [{"mode": "replicate"}, {"mode": "shard"}]
    found = []
    for mode in modes:
        trainer = build_trainer(TrainConfig.model_validate(settings | {"distributed": mode}), world)
        assert isinstance(trainer, Trainer)
        table, _ = trainer.collect(Clock())
        samples, totals = to_train(table, trainer.config.advantage, trainer.config.loss)
        metrics = trainer.update.run(samples, totals, Clock())
        found.append((metrics, {name: weight.clone() for name, weight in trainer.policy.named_weights()}))
    (told, weights), *others = found
    for mode, (metrics, own) in zip(modes[1:], others, strict=True):
        for key in ("router_aux_loss", "loss", "grad_norm"):
            apart = abs(metrics[key] - told[key])
            assert apart <= 1e-5 * abs(told[key]), f"{mode}: {key} differs by {apart}"
        for name, weight in weights.items():
            assert float((weight - own[name]).norm()) <= 1e-5 * float(weight.norm()) + 1e-6, (mode, name)


def main(world: World, folder: str) -> None:
    optimizer_module.SMALLEST = 0
    toy = json.loads((Path(folder) / "toy.json").read_text())
    check_balance(toy, f"{folder}/mixture", world)
    draw = random.Random(toy["seed"])
    for name in draw.sample([*CASES], 3):
        check(name, toy, f"{folder}/untied", world)


def make_others(toy: dict[str, Any], folder: str) -> None:
    """A second model, whose head is not its embedding, with weights of odd numbers of rows; and a mixture."""
    tied = toy["model"]["path"]
    sizes = {"vocab_size": 25, "intermediate_size": 49}
    untied = AutoConfig.from_pretrained(tied, tie_word_embeddings=False, **sizes)
    sizes = {key: getattr(untied, key) for key in ("vocab_size", "hidden_size", "num_attention_heads")}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
    mixture = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2, **sizes, **experts)
    for name, config in (("untied", untied), ("mixture", mixture)):
        AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/{name}")
        AutoTokenizer.from_pretrained(tied).save_pretrained(f"{folder}/{name}")


if __name__ == "__main__":
    make_others(json.loads(Path(sys.argv[1], "toy.json").read_text()), sys.argv[1])
    fork(main, 2, sys.argv[1])
