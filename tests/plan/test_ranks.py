from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_fast.config.policy import OptimizerConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.distributed.shards import rows_of
from grpo_fast.distributed.world import World
from grpo_fast.plan import auto
from grpo_fast.plan.auto import resolve_auto
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.model_shape import Shapes
from grpo_fast.plan.prediction import PHASES
from grpo_fast.plan.scaling import scaling, step_seconds
from grpo_fast.plan.search import Search, divisions, plan
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.rollout import vllm

SIZES = StepSizes(prompts=4, generations=4, prompt_length=40, completion_length=32, micro_batch_tokens=10**6)


def run(mode: str = "auto", **changes: Any) -> TrainConfig:
    sections = {
        "model": {"path": "-", "attention": "flash_attention_2"},
        "dataset": {"source": "any.jsonl", "max_prompt_length": 64},
        "rewards": [{"reward": "length"}],
        "rollout": {"num_generations": 8, "max_completion_length": 64},
        "distributed": {"mode": mode},
    }
    return TrainConfig.model_validate(sections | changes)


def gpus(ranks: int, **changes: Any) -> DeviceBudget:
    return replace(device_budget("H100"), ranks=ranks, **changes)


@pytest.fixture(scope="module")
def shapes(config: Any) -> Shapes:
    return Shapes(config("llama"))


def update(predictor: Any, shapes: Shapes, ranks: int, mode: str, **keys: Any) -> Any:
    sections = {"distributed": {"mode": mode}}
    found = predictor(shapes, gpus(ranks), sections, dtype="bfloat16", **keys)
    return found.predict(SIZES).parts["update"]


def test_each_rank_holds_what_was_predicted(shapes: Shapes, predictor: Any, config: Any) -> None:
    ranks = 3
    model = AutoModelForCausalLM.from_config(config("llama"), dtype=torch.bfloat16)
    parameters = dict(model.named_parameters())
    worlds = [World(rank, ranks) for rank in range(ranks)]
    optimizers = [PolicyOptimizer(parameters, OptimizerConfig(), total_steps=1, world=w) for w in worlds]
    masters = [sum(m.nbytes for m in one.masters().values()) for one in optimizers]
    rows = [sum(rows_of(p, world).nbytes for p in parameters.values()) for world in worlds]

    whole, sharded = (update(predictor, shapes, ranks, mode) for mode in ("replicate", "shard"))

    numbers, uneven = sum(p.numel() for p in parameters.values()), 1.03  # the first ranks' rows are more
    assert whole["master"] == sharded["master"] == -(-sum(masters) // ranks)
    assert sum(masters) == 4 * numbers and max(masters) <= uneven * whole["master"]
    assert whole["optimizer"] == -(-8 * numbers // ranks) + 512 * len(parameters)
    buffers = optimizers[0].gradient_buffers().values()
    assert whole["gradients"] == sum(buffer.nbytes for buffer in buffers)
    assert (whole["weights"], sharded["weights"]) == (sum(rows), -(-sum(rows) // ranks))
    assert max(rows) <= uneven * sharded["weights"]
    assert sharded["gradients"] == 2 * sharded["weights"]
    assert "exchange" not in sharded and "gathered" not in whole


def test_a_layer_and_a_gathered_head_are_whole_in_a_backward(shapes: Shapes, predictor: Any) -> None:
    def gathered(**keys: Any) -> int:
        return update(predictor, shapes, 2, "shard", **keys)["gathered"]

    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128
    assert gathered() == (2 * 2 + 2 + 4) * layer + (2 + 2) * 1000 * 128
    assert gathered() - gathered(train_lm_head=False) == 2 * 1000 * 128


def test_one_rank_is_planned_as_ever(shapes: Shapes) -> None:
    plain, sharded = (plan(run(mode), shapes, gpus(1)).choice for mode in ("auto", "shard"))

    assert (plain.parts, plain.seconds, plain.values) == (sharded.parts, sharded.seconds, sharded.values)
    assert plain.exchange == dict.fromkeys(PHASES, 0.0)


def test_the_plan_and_a_run_shard_what_does_not_fit_whole(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose layers and state are far more than one layer."""
    shapes = Shapes(config("llama", num_hidden_layers=8, vocab_size=200))
    needed = []
    for mode in ("replicate", "shard"):
        mine = run(mode)
        least = Search(mine, shapes, gpus(4)).least()
        needed.append(max(map(least.total, PHASES)))

    roomy, scarce = (plan(run(), shapes, gpus(4, total=total)) for total in (8 << 30, sum(needed) // 2))

    assert (roomy.choice.mode, scarce.choice.mode) == ("replicate", "shard")
    assert scarce.choice.free >= 0 > scarce.rivals[0].free
    assert roomy.rivals[0].free >= 0 and roomy.rivals[0].cost > roomy.choice.cost
    monkeypatch.setattr(auto, "shapes_of", lambda *_: shapes)
    monkeypatch.setattr(auto, "model_config", lambda *_, **__: shapes.config)
    monkeypatch.setattr(auto, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(auto, "device_budget", lambda: gpus(1, total=sum(needed) // 2))
    monkeypatch.setattr(vllm, "installed_version", lambda: "0.33.0")
    resolved = resolve_auto(run(), ranks=4)
    assert resolved.distributed == scarce.choice.predictor.run.distributed
    assert resolved.micro_batch_tokens == scarce.choice.sizes.micro_batch_tokens


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (8, {"prompts_per_step": 7}, r"prompts_per_step = 7 .* 8 ranks"),
        (2, {"distributed": {"mode": "shard"}, "memory": {"offload": ["reference"]}}, "reference"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    ranks: int, changes: dict[str, Any], message: str, config: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        divisions(run(**changes), config("qwen2"), gpus(ranks))

    assert divisions(run(**changes), config("qwen2"), gpus(1)) == [run(**changes)]


def test_ranks_on_a_cpu_replicate_and_one_of_too_few_prompts_is_refused(toy: dict[str, Any]) -> None:
    mine = TrainConfig.model_validate(toy | {"prompts_per_step": 2})

    found = resolve_auto(mine, ranks=2)

    assert found.distributed.mode == "replicate"
    assert resolve_auto(mine).distributed == mine.distributed
    with pytest.raises(ValueError, match="3 ranks"):
        resolve_auto(mine, ranks=3)


def test_one_gpu_waits_for_none_and_of_more_the_slowest_is_waited_for_longer(shapes: Shapes) -> None:
    alone, few, many = (
        step_seconds(plan(run(prompts_per_step=8), shapes, gpus(ranks)).choice) for ranks in (1, 2, 8)
    )

    choice = plan(run(prompts_per_step=8), shapes, gpus(1)).choice
    assert alone["rollout"] + alone["update"] == pytest.approx(sum(choice.seconds.values()))
    assert [alone[phase] for phase in ("waiting", "communication", "exchange")] == [0, 0, 0]
    assert 0 < few["waiting"] / few["rollout"] < many["waiting"] / many["rollout"] < 1
    assert min(few.values()) > 0


def test_efficiency_is_of_the_gpu_seconds_of_the_fewest(shapes: Shapes) -> None:
    alone, both = scaling(run(), shapes, [gpus(1), gpus(2)])

    assert (alone.gpus, alone.efficiency, both.gpus) == (1, 1, 2)
    assert both.efficiency == pytest.approx(sum(alone.seconds.values()) / (2 * sum(both.seconds.values())))
    with pytest.raises(ValueError, match=r"80GiB.*published"):
        scaling(run(), shapes, [replace(device_budget("80GiB"), ranks=2)])
