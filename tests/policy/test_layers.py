"""Liger's layers against transformers', by Triton's interpreter, and compiled layers against plain ones."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_fast.policy import Policy, Sample, load_policy, pack
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.layers import LIGER_TYPES, fuse_layers, resolve_liger

Load = Callable[..., Policy]
SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "pad_token_id": 2,
}


@pytest.fixture
def liger_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter lacks: the device's mathematical functions, and numbers as tensors of float32."""
    pytest.importorskip("liger_kernel", reason="install liger-kernel")
    if torch.cuda.is_available():
        return
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    plain = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return plain(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 1 - 2 / (tl.exp(2 * x) + 1))


def outcome(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states, and the gradient of every weight."""
    hidden = model.base_model(ids, use_cache=False).last_hidden_state.float()
    (hidden * torch.linspace(-1, 1, hidden.numel(), device=ids.device).view_as(hidden)).sum().backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return hidden.detach(), torch.cat(gradients)


def distances(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]


@pytest.mark.parametrize("kind", sorted(LIGER_TYPES))
def test_liger_computes_a_layer_as_transformers_does(
    kind: str, liger_interpreted: None, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 to rounding; in bfloat16 no further from float32 than transformers: it rounds as often."""
    torch.manual_seed(seed)
    ids = torch.randint(61, (1, 4), device=device)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).to(device)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    names = vars(sys.modules[type(model).__module__])
    for name, value in [*names.items()]:  # what Liger puts there is taken back
        monkeypatch.setitem(names, name, value)
    half = copy.deepcopy(model).bfloat16()
    (plain, right), own = (outcome(m, ids) for m in (model, copy.deepcopy(half).float())), outcome(half, ids)
    monkeypatch.setattr("grpo_fast.policy.layers.resolve_liger", lambda *_: True)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", None)
    for changed in (model, half):
        changed.zero_grad()
        fuse_layers(changed, ModelConfig(path="-", compile=False), torch.device("cpu"))

    assert max(distances(outcome(model, ids), plain)) < 1e-5
    assert any("Liger" in module._get_name() for module in model.modules())
    assert torch.nn.functional.cross_entropy is None and "forward" not in vars(model)  # losses stay
    of_liger, of_own = distances(outcome(half, ids), right), distances(own, right)
    assert of_liger[0] < 1.05 * of_own[0] and of_liger[1] < 3 * of_own[1]


@pytest.mark.parametrize(
    ("wanted", "device", "kind", "chosen"),
    [
        ("auto", "cuda", "qwen2", True),
        ("auto", "cuda", "olmo2", False),
        ("auto", "cpu", "qwen2", False),
        (False, "cuda", "qwen2", False),
        (True, "cuda", "olmo2", True),
        (True, "cuda", "cohere", "Liger has none for 'cohere'"),
        (True, "cpu", "qwen2", "needs a CUDA device, not cpu"),
    ],
)
def test_liger_is_chosen_where_it_is_known_to_be_exact_or_asked_for(
    wanted: object, device: str, kind: str, chosen: object
) -> None:
    pytest.importorskip("liger_kernel", reason="install liger-kernel")
    config = ModelConfig(path="-", liger_kernels=wanted)

    if isinstance(chosen, bool):
        assert resolve_liger(config, torch.device(device), kind) is chosen
    else:
        with pytest.raises(ValueError, match=rf"model\.liger_kernels = true.*{chosen}"):
            resolve_liger(config, torch.device(device), kind)


def test_liger_is_left_out_where_it_is_not_installed_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_fast.policy.layers.find_spec", lambda name: None)

    assert not resolve_liger(ModelConfig(path="-"), torch.device("cuda"), "qwen2")
    with pytest.raises(ImportError, match=r"liger_kernels = true needs liger-kernel: pip install"):
        resolve_liger(ModelConfig(path="-", liger_kernels=True), torch.device("cuda"), "qwen2")


@pytest.mark.parametrize(
    ("device", "kind", "part", "wanted", "compiled"),
    [
        ("cuda", "olmo2", "mlp", "auto", True),
        ("cuda", "qwen2", "mlp", "auto", False),  # Liger's
        ("cuda", "olmo2", "experts", "auto", False),
        ("cuda", "olmo2", "mlp", False, False),
        ("cpu", "olmo2", "mlp", "auto", False),
        ("cpu", "olmo2", "experts", True, True),
    ],
)
def test_layers_are_compiled_on_a_gpu_where_liger_does_not_compute_them(
    device: str, kind: str, part: str, wanted: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel", reason="install liger-kernel")
    monkeypatch.setattr("liger_kernel.transformers._apply_liger_kernel_to_instance", lambda **_: None)
    model = torch.nn.Module()
    model.config = SimpleNamespace(model_type=kind)
    model.layer = GradientCheckpointingLayer()
    model.layer.register_module(part, torch.nn.Linear(1, 1))

    fuse_layers(model, ModelConfig(path="-", compile=wanted), torch.device(device))

    assert ("forward" in vars(model.layer)) == compiled


@torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
def test_compiled_layers_are_compiled_once_for_batches_of_every_length(
    folder_of: Callable[..., Path], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients and without, and more layers than that; weights move to other memory, as vLLM's sharing
    moves them. Generation compiles nothing."""
    graphs: list[Any] = []
    monkeypatch.setattr("grpo_fast.policy.layers.TILE_TOKENS", 20)

    def backend(graph: Any, inputs: Any, **_: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    path = str(folder_of("llama", num_hidden_layers=3))
    settings = {"path": path, "dtype": "float32", "device": "cpu", "gradient_checkpointing": "mlp"}
    plain, compiled = (load_policy(ModelConfig(**settings, compile=wanted)) for wanted in (False, True))
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()

    counts = []
    for some in (samples[:2], samples * 9, samples[:1], samples):
        (batch,) = pack(some, max_tokens=10**6, device="cpu")
        for policy in (plain, compiled):
            policy.model.zero_grad()
            hidden = policy.hidden_states(batch)  # the sum of its squares is nearly constant
            (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        for name, parameter in plain.trainable().items():
            error = (compiled.trainable()[name].grad - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-4, (name, error)
        compiled.model.generate(batch.input_ids[None, : 4 + len(counts)], max_new_tokens=3)
        for weight in compiled.model.parameters():
            weight.data = torch.cat([weight.data.new_empty(64), weight.data.flatten()])[64:].view_as(weight)
        counts.append(len(graphs))

    assert counts[0] > 0 and counts == counts[:1] * 4


def test_a_compiled_reference_has_layers_of_its_own(
    load: Load, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        torch, "compile", lambda forward, **_: lambda *a, **k: [called.append(0), forward(*a, **k)][1]
    )
    policy = load("llama", compile=True, needs_reference=True)
    (batch,) = pack(samples, max_tokens=10**6, device="cpu")
    before = policy.hidden_states(batch)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.mul_(1.1)

    called.clear()
    with policy.reference() as reference:
        assert torch.equal(reference.hidden_states(batch), before)
    assert len(called) == 2  # layers


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, "mlp", True])
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_compiled_layers_on_a_gpu_round_as_plain_ones_do(
    load: Load, samples: list[Sample], checkpointing: Any, lora: Any
) -> None:
    """Else the log-probabilities of a forward with gradients would not be those of one without."""
    settings = {"device": "cuda", "dtype": "bfloat16", "lora": lora, "gradient_checkpointing": checkpointing}
    plain, compiled = (load("llama", **settings, liger_kernels=False, compile=c) for c in (False, True))
    compiled.model.load_state_dict(plain.model.state_dict())
    for some in (samples, samples[:3]):
        (batch,) = pack(some, max_tokens=10**6, device="cuda")
        with torch.no_grad():
            of_plain, without = plain.hidden_states(batch), compiled.hidden_states(batch)
        assert torch.equal(compiled.hidden_states(batch), without)
        torch.testing.assert_close(without, of_plain, rtol=1e-2, atol=1e-2)
