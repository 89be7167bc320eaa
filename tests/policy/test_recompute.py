"""What is recomputed has the gradients of what is kept, is computed twice, and holds one tile at a time."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_fast.policy import (
    PackedBatch,
    Policy,
    PolicyOptimizer,
    Sample,
    layer_inputs,
    load_policy,
    pack,
    recompute,
)
from grpo_fast.policy.config import ModelConfig, OptimizerConfig
from grpo_fast.policy.recompute import decoder_layers

Load = Callable[..., Policy]


@pytest.fixture
def batch(samples: list[Sample]) -> PackedBatch:
    (batch,) = pack(samples, max_tokens=10_000, device="cpu")
    return batch


@pytest.fixture(params=["shorter", "exact", "longer", "several"])
def tile(
    request: pytest.FixtureRequest, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch, seed: int
) -> int:
    """Tokens of a tile, compared with which the batch is as the parameter says."""
    tokens = batch.input_ids.numel()
    several = random.Random(seed).randint(2, tokens // 2)
    size = {"shorter": tokens + 1, "exact": tokens, "longer": tokens - 1, "several": several}[request.param]
    monkeypatch.setattr(recompute, "TILE_TOKENS", size)
    return size


def gradients_of(policy: Policy, batch: PackedBatch, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)  # of LoRA's dropout
    policy.model.zero_grad()
    policy.hidden_states(batch).square().sum().backward()
    return {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}


def in_tiles_with_graph(policy: Policy) -> None:
    for mlp in recompute.token_wise_mlps(policy.model):
        plain = mlp.forward
        mlp.forward = lambda hidden, plain=plain: torch.cat([plain(t) for t in recompute._tiles(hidden)], 1)


@contextmanager
def tokens_computed(policy: Policy) -> Iterator[list[int]]:
    """Of each call of an MLP's own forward."""
    counts: list[int] = []
    mlps = [mlp for name, mlp in policy.base_model.named_modules() if name.endswith(".mlp")]
    hooks = [
        next(mlp.children()).register_forward_pre_hook(lambda _, args: counts.append(args[0][..., 0].numel()))
        for mlp in mlps
    ]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("family", "how", "settings", "passes"),
    [
        ("llama", "mlp", {"train_lm_head": False}, 2),
        ("gpt2", True, {}, 2),
        ("gemma2", "mlp", {"lora": {"r": 2, "dropout": 0.5}}, 2),
        ("gemma2", True, {"lora": {"r": 2, "dropout": 0.5}}, 3),  # its norm after the MLP needs the result
        ("qwen2", "mlp", {"lora": {"r": 2, "target_modules": ["down_proj"]}}, 2),  # no gradient before it
        ("qwen3_moe", "mlp", {}, 2),  # whose experts are never tiled
        ("qwen3_moe", True, {}, 2),
    ],
)
def test_recomputed_mlps_have_the_same_gradients_and_run_once_more_in_tiles(
    load: Load, batch: PackedBatch, tile: int, seed: int, family: str, how: Any, settings: Any, passes: Any
) -> None:
    plain, ours = (load(family, gradient_checkpointing=on, **settings) for on in (False, how))
    ours.model.load_state_dict(plain.model.state_dict())
    tiled, tolerance = family != "qwen3_moe", 1e-5
    if tiled:
        plain.model.double(), ours.model.double()
        tolerance = 1e-9
    if "lora" in settings:  # dropout is drawn for each tile
        in_tiles_with_graph(plain)
    expected, tokens = gradients_of(plain, batch, seed), batch.input_ids.numel()

    with tokens_computed(ours) as counts:
        found = gradients_of(ours, batch, seed)
        with_gradients = sum(counts)
        with torch.no_grad():
            ours.hidden_states(batch)

    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)
    passes = 2 if tokens <= tile else passes
    assert with_gradients == passes * 2 * tokens and sum(counts) == (passes + 1) * 2 * tokens
    assert max(counts) <= tile if tiled else min(counts) == tokens


def test_gradients_of_tiles_are_added_up_in_float32(
    load: Load, batch: PackedBatch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 they come as close to float32's as those of all tokens at one time."""
    right = gradients_of(load("llama"), batch, seed)
    errors = []
    for tokens in (10_000, 3):
        monkeypatch.setattr(recompute, "TILE_TOKENS", tokens)
        policy = load("llama", dtype="bfloat16", gradient_checkpointing="mlp")
        optimizer = PolicyOptimizer(policy.trainable(), OptimizerConfig(max_grad_norm=None), total_steps=1)
        gradients_of(policy, batch, seed)
        optimizer.step()
        moments = optimizer.moments()
        parts = [(moments[f"exp_avg.{name}"], 0.1 * right[name]) for name in right if ".mlp." in name]
        errors.append(
            float(sum((a - b).norm() ** 2 for a, b in parts) / sum(b.norm() ** 2 for _, b in parts))
        )

    assert errors[1] < 1.5 * errors[0]


def test_tiles_of_a_base_in_4_bits_train_its_adapters(
    load: Load, batch: PackedBatch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "TILE_TOKENS", batch.input_ids.numel() // 3)
    settings = {"quantization": "nf4", "lora": {"r": 2}}
    plain, ours = (load("llama", gradient_checkpointing=how, **settings) for how in (False, True))
    with torch.no_grad():
        for name, parameter in plain.trainable().items():  # B begins as zeros
            ours.trainable()[name].copy_(parameter.normal_())

    found = gradients_of(ours, batch, seed)
    for name, gradient in gradients_of(plain, batch, seed).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4 * gradient.norm(), msg=name)


def test_a_reference_computes_long_batches_in_tiles_too(
    load: Load, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "TILE_TOKENS", 5)
    policy = load("llama", gradient_checkpointing=True, needs_reference=True)
    with policy.reference() as reference, tokens_computed(reference) as counts:
        reference.hidden_states(batch)
    assert max(counts) <= 5


def test_layers_without_an_mlp_of_their_own_are_named(load: Load) -> None:
    with pytest.raises(ValueError, match=r"model\.gradient_checkpointing = 'mlp': .* of OPTForCausalLM"):
        load("opt", gradient_checkpointing="mlp")


def test_inputs_do_not_leave_a_device_that_is_the_host(folder_of: Callable[..., Path]) -> None:
    config = ModelConfig(path=str(folder_of("llama")), device="cpu", gradient_checkpointing="offload")
    with pytest.raises(ValueError, match=r"gradient_checkpointing = 'offload'.*model\.device is cpu.*true"):
        load_policy(config)


class LateStream:
    """Copies that are made no earlier than they are waited for, from memory that must still be there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending: list[Any] = []
        self.done = 0
        monkeypatch.setattr(layer_inputs, "_copy", self.copy)
        monkeypatch.setattr(layer_inputs, "_wait", self.wait)

    def copy(self, targets: Any, sources: Any, stream: object) -> int:
        pairs = [
            [(weakref.ref(t.untyped_storage()), t.storage_offset(), len(t)) for t in p]
            for p in zip(targets, sources, strict=True)
        ]
        self.pending.append((targets[0].dtype, pairs))
        return len(self.pending)

    def wait(self, event: int, device: object) -> None:
        for dtype, pairs in self.pending[self.done : event]:
            for pair in pairs:
                storages = [(storage(), offset, count) for storage, offset, count in pair]
                assert all(storage is not None for storage, _, _ in storages), (
                    "memory was given away too early"
                )
                target, source = (
                    torch.empty(0, dtype=dtype).set_(storage, offset, (count,))
                    for storage, offset, count in storages
                )
                target.copy_(source)
        self.done = max(self.done, event)


@pytest.mark.parametrize("late", [False, True])
def test_inputs_of_layers_wait_in_the_hosts_memory_and_come_back_to_the_bit(
    folder_of: Callable[..., Path],
    samples: list[Sample],
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Over several steps, of batches of several lengths, and two of them under way at one time."""
    monkeypatch.setattr(layer_inputs, "BLOCK_BYTES", 4 * random.Random(seed).randint(1, 2000))
    path = str(folder_of("llama", num_hidden_layers=4))
    plain, ours = (load_policy(ModelConfig(path=path, dtype="float32", device="cpu")) for _ in range(2))
    recompute.recompute(ours.base_model, "offload")
    if late:
        LateStream(monkeypatch)
    inputs: list[Any] = []
    for layer in decoder_layers(ours.model):
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))

    def here() -> int:
        return sum(storage() is not None for storage in inputs)

    gc.disable()
    for some in (samples[:5], samples, samples[7:]):
        (batch,), (other,) = (pack(part, max_tokens=10_000, device="cpu") for part in (some, samples[3:]))
        for policy in (plain, ours):
            policy.model.zero_grad()
            inputs.clear()
            first = policy.hidden_states(batch).square().sum()
            if policy is ours:
                assert here() == 1  # the last layer's
            with torch.no_grad():
                policy.hidden_states(other)
            second = policy.hidden_states(other).square().sum()
            first.backward()
            second.backward()
        for name, parameter in plain.trainable().items():
            assert torch.equal(parameter.grad, ours.trainable()[name].grad), name
        del first, second
        inputs.clear()
        ours.hidden_states(batch).sum()  # no backward follows
        assert here() == 0
    gc.enable()
