"""Compare planned bytes with those of torch's allocator, in updates and rollouts of small models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from grpo_fast.config.policy import LoraConfig, ModelConfig, OptimizerConfig
from grpo_fast.distributed.shards import rows_of
from grpo_fast.distributed.world import World
from grpo_fast.loop.update import packed_loss
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import measured_shape, peak_bytes, random_batches, random_policy
from grpo_fast.plan.memory import Setup, step_bytes
from grpo_fast.plan.model_shape import model_config, model_shape
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.policy.load import resolve_attention

UPDATE = StepSizes(prompts=4, generations=4, prompt_length=64, completion_length=64, micro_batch_tokens=10**6)
SEVERAL = replace(UPDATE, micro_batch_tokens=400)
LONG = replace(UPDATE, prompts=1, generations=2, completion_length=1024)
LORA = {"lora": LoraConfig(r=8)}
QLORA = LORA | {"quantization": "nf4"}
PLAIN, WHOLE, MLPS = ({"gradient_checkpointing": value} for value in (False, True, "mlp"))
OUTSIDE = ("context", "engine residue", "fragmentation")


def allocated(setup: Setup, sizes: StepSizes) -> int:
    """Return what torch's allocator should hold in an update."""
    parts = step_bytes(setup, sizes)["update"]
    return sum(size for part, size in parts.items() if part not in OUTSIDE)


def measured_update(setup: Setup, config: Any, sizes: StepSizes) -> int:
    """Return the most bytes of two updates; Adam's moments are there in the second."""
    run, device = setup.config, torch.device(setup.device.kind)
    attention = resolve_attention(run.model.attention, device, run.model.dtype, config)

    def prepare() -> tuple[Any, ...]:
        policy = random_policy(config, run.model, attention=attention, device=device)
        offload = list(setup.offloaded)
        optimizer = PolicyOptimizer(policy.trainable(), run.optimizer, total_steps=2, on_host=offload)
        return policy, optimizer, random_batches(policy, sizes)

    def updates(made: tuple[Any, ...]) -> None:
        policy, optimizer, batches = made
        for _ in range(2):
            for batch in batches:
                packed_loss(policy, batch, optimizer=optimizer).loss.backward()
            optimizer.step()

    return peak_bytes(prepare, updates, device)


@pytest.mark.parametrize(
    ("family", "dtype", "way", "sizes"),
    [
        ("llama", "float32", PLAIN, UPDATE),
        ("llama", "float32", PLAIN, SEVERAL),
        ("llama", "float32", PLAIN, LONG),
        ("llama", "float32", WHOLE, UPDATE),
        ("llama", "float32", MLPS | LORA, UPDATE),
        ("llama", "bfloat16", PLAIN, UPDATE),
        ("qwen2", "float32", PLAIN | LORA, UPDATE),
        ("qwen2", "float32", PLAIN | {"train_lm_head": False}, UPDATE),
        ("gemma3_text", "float32", PLAIN, UPDATE),
        ("gemma3_text", "float32", WHOLE | LORA, UPDATE),
        ("qwen3_moe", "bfloat16", PLAIN, UPDATE),
        ("qwen3_moe", "bfloat16", WHOLE | LORA, UPDATE),
        ("qwen3_5_text", "float32", PLAIN | LORA, UPDATE),
        ("qwen3_5_text", "float32", WHOLE, UPDATE),
    ],
)
@pytest.mark.drawn(7)
def test_an_update_takes_no_more_than_planned_and_not_much_less(
    family: str, dtype: str, way: dict[str, Any], sizes: StepSizes, config: Any, setup: Any
) -> None:
    planned = setup(config(family), model=way | {"dtype": dtype})

    measured = measured_update(planned, config(family), sizes)

    most = 1.6 if family == "qwen3_5_text" else 1.35 if way["gradient_checkpointing"] else 1.25
    least = 0.8 if sizes is LONG else 0.98  # on a CPU SDPA copies the keys of long completions
    assert least * measured <= allocated(planned, sizes) <= most * measured


def test_adapters_of_experts_are_planned_with_the_experts_they_join(config: Any, setup: Any) -> None:
    wide = config("qwen3_moe", num_experts=8, moe_intermediate_size=128)
    planned = setup(wide, model=PLAIN | LORA)

    measured = measured_update(planned, wide, UPDATE)

    assert 0.95 * measured <= allocated(planned, UPDATE) <= 1.25 * measured


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_probe_replaces_the_counted_slope_by_the_measured_one(
    family: str, config: Any, setup: Any, tmp_path: Any
) -> None:
    small = config(family, num_hidden_layers=4, **({} if family == "llama" else {"layer_types": None}))
    small.save_pretrained(tmp_path)
    counted = setup(small, model=PLAIN | {"dtype": "float32", "path": str(tmp_path)})
    wrong = replace(
        counted.shape, layers=tuple(replace(one, mlp=9 * one.mlp) for one in counted.shape.layers)
    )

    shape = measured_shape(counted.config.model, counted.shape, torch.device("cpu"))

    measured = measured_update(counted, small, LONG)
    assert 0.95 * measured <= allocated(replace(counted, shape=shape), LONG) <= 1.3 * measured
    assert allocated(replace(counted, shape=wrong), LONG) > 1.5 * measured


@pytest.mark.gpu
@pytest.mark.parametrize("way", [PLAIN, WHOLE, MLPS, PLAIN | LORA], ids=str)
def test_an_update_on_the_gpu_takes_what_a_probe_says(way: dict[str, Any], setup: Any) -> None:
    config, gpu = model_config("Qwen2.5-0.5B"), device_budget()
    sizes = StepSizes(
        prompts=8, generations=8, prompt_length=256, completion_length=512, micro_batch_tokens=16384
    )
    model = way | {"path": "Qwen2.5-0.5B", "compile": False}
    planned = setup(config, gpu, model=model, memory={"offload": "none"})
    shape = measured_shape(planned.config.model, planned.shape, torch.device("cuda"))

    measured = measured_update(planned, config, sizes)

    assert 0.95 * measured <= allocated(replace(planned, shape=shape), sizes) <= 1.2 * measured


def test_each_rank_holds_what_was_planned(config: Any, setup: Any) -> None:
    ranks, small = 3, config("llama")
    parameters = dict(AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16).named_parameters())
    worlds = [World(rank, ranks) for rank in range(ranks)]
    optimizers = [PolicyOptimizer(parameters, OptimizerConfig(), total_steps=1, world=w) for w in worlds]
    masters = [sum(m.nbytes for m in one.masters().values()) for one in optimizers]
    rows = [sum(rows_of(p, world).nbytes for p in parameters.values()) for world in worlds]
    gpus = replace(device_budget("H100"), ranks=ranks)

    whole, sharded = (
        step_bytes(setup(small, gpus, distributed={"mode": mode}, memory={"offload": "none"}), UPDATE)[
            "update"
        ]
        for mode in ("replicate", "shard")
    )

    uneven = 1.03  # the first ranks' rows are more
    assert whole["master"] == sharded["master"] == sum(masters) // ranks
    assert max(masters) <= uneven * whole["master"]
    buffers = optimizers[0].gradient_buffers().values()
    assert whole["gradients"] == sum(buffer.nbytes for buffer in buffers)
    assert (whole["weights"], sharded["weights"]) == (sum(rows), sum(rows) // ranks)
    assert max(rows) <= uneven * sharded["weights"]
    assert "gathered" in sharded and "gathered" not in whole


@pytest.fixture
def on_gpu(config: Any, setup: Any) -> Any:
    """`on_gpu(memory={...})`: the parts of a small model with vLLM on an H200."""

    def parts(**sections: Any) -> dict[str, dict[str, int]]:
        sections = {"memory": {"offload": "none"}} | sections
        return step_bytes(setup(config(), device_budget("H200"), **sections), UPDATE)

    return parts


def test_an_awake_engine_and_a_reference_take_their_room(on_gpu: Any) -> None:
    plain, awake = on_gpu(), on_gpu(rollout={"vllm": {"sleep_level": 0}})
    total = {name: sum(parts["update"].values()) for name, parts in (("plain", plain), ("awake", awake))}

    assert "KV cache" not in plain["update"]
    assert total["awake"] - total["plain"] == plain["rollout"]["KV cache"]
    assert on_gpu(loss={"beta": 0.1})["update"]["reference"] == plain["update"]["weights"]


def test_offloaded_parts_are_away_in_the_rollout_and_state_always(on_gpu: Any) -> None:
    plain = on_gpu()

    gradients = on_gpu(memory={"offload": ["gradients"]})
    state = on_gpu(memory={"offload": ["optimizer", "master"]})
    assert gradients["update"] == plain["update"]  # they come back
    assert "gradients" not in gradients["rollout"] and "gradients" in plain["rollout"]
    assert {"optimizer", "master"}.isdisjoint(state["rollout"])
    assert state["update"].get("optimizer", 0) < plain["update"]["optimizer"]
    assert on_gpu(optimizer={"kind": "adamw_offload"})["update"] == state["update"]


@pytest.mark.parametrize(
    ("model", "vllm", "copies", "adapters"),
    [
        ({}, {}, 0, 0),
        ({}, {"share_weights": False}, 1, 0),
        (LORA, {}, 1, 0),  # merged
        (QLORA, {}, 0, 1),
        (QLORA, {"tensor_parallel_size": 2}, 1, 1),
    ],
)
def test_the_engine_has_the_trainers_weights_or_a_copy(
    model: Any, vllm: Any, copies: int, adapters: int, config: Any, setup: Any
) -> None:
    planned = setup(config("llama"), device_budget("H200"), model=model, rollout={"vllm": vllm})

    shape = planned.shape
    own = 2 * (copies * (shape.parameters - shape.adapters) + adapters * shape.adapters)
    assert step_bytes(planned, UPDATE)["rollout"].get("engine weights", 0) == own


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "minicpm3", "qwen3_5_text", "falcon_h1"])
def test_a_sequences_keys_values_and_states_are_what_its_cache_holds(family: str, config: Any) -> None:
    """Of a window the cache keeps one token less."""
    small = config(family)
    shape = model_shape(small, ModelConfig(path="-", dtype="float32"))
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()

    with torch.no_grad():
        cache = model(torch.ones(1, 40, dtype=torch.int64), use_cache=True).past_key_values

    tensors = tree_leaves([list(vars(layer).values()) for layer in cache.layers])
    held = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.dim() > 1)
    assert held <= shape.kv_bytes(40) <= 1.1 * held
