"""What is recomputed has the gradients of what is kept, is computed twice, and holds one tile at a time."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
    host_memory,
    layers,
    load_policy,
    pack,
)
from grpo_fast.policy.config import ModelConfig, OptimizerConfig

Load = Callable[..., Policy]


@pytest.fixture
def batch(samples: list[Sample]) -> PackedBatch:
    (batch,) = pack(samples, max_tokens=10_000, device="cpu")
    return batch


def objective(policy: Policy, batch: PackedBatch) -> Tensor:
    """Not the sum of squares, which the final norm has made constant."""
    hidden = policy.hidden_states(batch)
    return (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum()


def gradients_of(policy: Policy, batch: PackedBatch, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)  # of LoRA's dropout
    policy.model.zero_grad()
    objective(policy, batch).backward()
    return {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}


@contextmanager
def tokens_computed(policy: Policy) -> Iterator[list[int]]:
    """Of each call of an MLP's own forward."""
    counts: list[int] = []
    mlps = [mlp for name, mlp in policy.base_model.named_modules() if name.endswith(".mlp")]

    def count(module: Any, inputs: tuple[Tensor]) -> None:
        counts.append(inputs[0][..., 0].numel())

    hooks = [next(mlp.children()).register_forward_pre_hook(count) for mlp in mlps]
    yield counts
    for hook in hooks:
        hook.remove()


def in_tiles(plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return torch.cat([plain(tile) for tile in layers._tiles(hidden)], 1)


@pytest.mark.parametrize(
    ("family", "how", "settings", "passes"),
    [
        ("llama", "mlp", {"train_lm_head": False}, 2),
        ("gpt2", True, {}, 2),
        ("gemma2", "mlp", {"lora": {"r": 2, "dropout": 0.5}}, 2),
        ("gemma2", True, {"lora": {"r": 2, "dropout": 0.5}}, 3),  # its norm after the MLP needs the result
        ("qwen2", "mlp", {"lora": {"r": 2, "target_modules": ["down_proj"]}}, 2),  # no gradient before it
        ("llama", True, {"lora": {"r": 2}, "quantization": "nf4"}, 2),
        ("qwen3_moe", "mlp", {}, 2),  # whose experts are never in tiles
        ("qwen3_moe", True, {}, 2),
    ],
)
def test_recomputed_mlps_have_the_same_gradients_and_run_once_more_in_tiles(
    load: Load,
    batch: PackedBatch,
    seed: int,
    family: str,
    how: Any,
    settings: Any,
    passes: int,
    monkeypatch: Any,
) -> None:
    plain, ours = (load(family, gradient_checkpointing=on, **settings) for on in (False, how))
    for name, parameter in plain.trainable().items():
        parameter.data += 0.1 * torch.randn_like(parameter)  # else LoRA's B are zeros
        ours.trainable()[name].data.copy_(parameter)
    tolerance = 1e-4
    if family != "qwen3_moe" and "quantization" not in settings:  # which compute in 32 bits at most
        plain.model.double(), ours.model.double()
        tolerance = 1e-9
    if "dropout" in settings.get("lora", {}):  # it is drawn for each tile
        for mlp in layers.token_wise_mlps(plain.model):
            mlp.forward = partial(in_tiles, mlp.forward)
    tokens = batch.input_ids.numel()
    for tile in (tokens + 1, tokens, tokens - 1, random.Random(seed).randint(2, tokens // 2)):
        monkeypatch.setattr(layers, "TILE_TOKENS", tile)
        expected = gradients_of(plain, batch, seed)
        with tokens_computed(ours) as counts:
            found = gradients_of(ours, batch, seed)
            with_gradients = sum(counts)
            with torch.no_grad():
                ours.hidden_states(batch)

        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error < tolerance, (name, error, tile, tokens)
        assert with_gradients == (2 if tokens <= tile else passes) * 2 * tokens  # layers
        assert sum(counts) == with_gradients + 2 * tokens
        assert max(counts) == tokens if family == "qwen3_moe" else max(counts) <= tile


def test_gradients_of_tiles_are_added_up_in_float32(
    load: Load, batch: PackedBatch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 they come as close to float32's as those of all tokens at one time."""
    right, errors = gradients_of(load("llama"), batch, seed), []
    for tokens in (10_000, 3):
        monkeypatch.setattr(layers, "TILE_TOKENS", tokens)
        policy = load("llama", dtype="bfloat16", gradient_checkpointing="mlp")
        optimizer = PolicyOptimizer(policy.trainable(), OptimizerConfig(max_grad_norm=None), total_steps=1)
        gradients_of(policy, batch, seed)
        optimizer.step()
        moments = optimizer.moments()
        parts = [(moments[f"exp_avg.{name}"], 0.1 * right[name]) for name in right if ".mlp." in name]
        errors.append(sum(float((a - b).norm() ** 2) for a, b in parts))
    assert errors[1] < 1.5 * errors[0]


def test_a_reference_computes_long_batches_in_tiles(load: Load, batch: PackedBatch, monkeypatch: Any) -> None:
    monkeypatch.setattr(layers, "TILE_TOKENS", 5)
    policy = load("llama", gradient_checkpointing=True, needs_reference=True)
    with policy.reference() as reference, tokens_computed(reference) as counts:
        reference.hidden_states(batch)
    assert max(counts) <= 5


def test_what_a_model_or_device_cannot_have_is_refused(load: Load) -> None:
    with pytest.raises(ValueError, match=r"model\.gradient_checkpointing = 'mlp': .* of OPTForCausalLM"):
        load("opt", gradient_checkpointing="mlp")
    with pytest.raises(ValueError, match=r"gradient_checkpointing = 'offload'.*model\.device is cpu.*true"):
        load("llama", gradient_checkpointing="offload")


class LateStream:
    """Copies that are made no earlier than they are waited for, and hold their memory until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told, self.done, self.plain = [], 0, host_memory.copy_beside
        monkeypatch.setattr(host_memory, "copy_beside", self.copy)
        monkeypatch.setattr(host_memory, "wait", self.wait)

    def copy(self, *arguments: Any) -> int:
        self.told.append(partial(self.plain, *arguments))
        return self.done + len(self.told)

    def wait(self, event: int, device: object) -> None:
        while self.done < event:
            self.told.pop(0)()
            self.done += 1


@pytest.mark.parametrize("late", [False, True])
def test_inputs_of_layers_wait_in_the_hosts_memory_and_come_back_to_the_bit(
    folder_of: Callable[..., Path],
    samples: list[Sample],
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Over several steps, of batches of several lengths, and two of them under way at one time."""
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 4 * random.Random(seed).randint(1, 2000))
    path = str(folder_of("llama", num_hidden_layers=4))
    plain, ours = (load_policy(ModelConfig(path=path, dtype="float32", device="cpu")) for _ in range(2))
    layers.recompute(ours.base_model, "offload")
    if late:
        LateStream(monkeypatch)
    inputs: list[Any] = []
    for layer in layers.decoder_layers(ours.model):
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))

    def on_the_device() -> int:
        return sum(storage() is not None for storage in inputs)

    gc.disable()  # what is kept must go by itself
    for some in (samples[:5], samples, samples[7:]):
        (batch,), (other,) = (pack(part, max_tokens=10_000, device="cpu") for part in (some, samples[3:]))
        for policy in (plain, ours):
            policy.model.zero_grad()
            inputs.clear()
            first = objective(policy, batch)
            assert policy is plain or on_the_device() == 1  # the last layer's
            with torch.no_grad():
                policy.hidden_states(other)
            second = objective(policy, other)
            first.backward()
            second.backward()
        for name, parameter in plain.trainable().items():
            assert torch.equal(parameter.grad, ours.trainable()[name].grad), name
        del first, second
        inputs.clear()
        ours.hidden_states(batch)  # no backward follows
        assert on_the_device() == 0
    gc.enable()
