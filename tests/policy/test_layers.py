"""Layers that run otherwise compute the same: recomputed, in tiles, inputs on the host, Liger's, compiled."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_fast.config.policy import ModelConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.policy import layers, load_policy, pack
from grpo_fast.policy.layers import LIGER_TYPES, resolve_compile, resolve_liger, use_liger


def weighted(hidden):
    """An objective: not the sum of squares, which the final norm has made constant."""
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype, device=hidden.device)
    return (hidden * weights.view_as(hidden)).sum()


def gradients_of(policy, batch, seed):
    torch.manual_seed(seed)  # of LoRA's dropout
    policy.model.zero_grad()
    weighted(policy.hidden_states(batch)).backward()
    return {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}


def distance(found, right):
    return float((found - right).norm() / right.norm())


@contextmanager
def tokens_computed(policy):
    """Of each call of an MLP's own forward."""
    counts = []
    mlps = [mlp for name, mlp in policy.base_model.named_modules() if name.endswith(".mlp")]

    def count(module, inputs):
        counts.append(inputs[0][..., 0].numel())

    hooks = [next(mlp.children()).register_forward_pre_hook(count) for mlp in mlps]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("family", "how", "settings", "passes"),
    [
        ("llama", "mlp", {"train_lm_head": False}, 2),
        ("gpt2", True, {}, 3),  # a layer's recomputation computes its tiles, too
        ("gemma2", "mlp", {"lora": {"r": 2}}, 2),
        ("gemma2", True, {"lora": {"r": 2, "dropout": 0.5}}, None),  # whose random numbers come once more
        ("qwen2", "mlp", {"lora": {"r": 2, "target_modules": ["down_proj"]}}, 2),  # no gradient before it
        ("llama", True, {"lora": {"r": 2}, "quantization": "nf4"}, 3),
        ("qwen3_moe", "mlp", {}, None),
        ("mixtral", True, {"lora": {"r": 2}}, None),  # experts adapted in one tensor
        ("qwen3_moe", "offload", {"lora": {"r": 2}}, None),
        ("qwen3_5_text", True, {}, 3),  # with a state
        ("qwen3_5_text", "mlp", {}, 2),
    ],
)
@pytest.mark.drawn(6)
def test_recomputed_layers_have_the_same_gradients_and_mlps_run_in_tiles(
    load, batch, seed, family, how, settings, passes, monkeypatch
):
    """None: not in tiles."""
    on_load = how if how != "offload" else False  # which is refused without a GPU
    plain, ours = (load(family, gradient_checkpointing=on, **settings) for on in (False, on_load))
    if how == "offload":
        layers.recompute(ours.base_model, how)
    for name, parameter in plain.trainable().items():
        parameter.data += 0.1 * torch.randn_like(parameter)  # else LoRA's B are zeros
        ours.trainable()[name].data.copy_(parameter)
    tolerance = 1e-4
    if passes and "quantization" not in settings:  # grouped experts have no float64
        plain.model.double(), ours.model.double()
        tolerance = 1e-9
    tokens = batch.input_ids.numel()
    for tile in (tokens, tokens - 1, random.Random(seed).randint(2, tokens // 2)):
        monkeypatch.setattr(layers, "TILE_TOKENS", tile)
        expected = gradients_of(plain, batch, seed)
        with tokens_computed(ours) as counts:
            found = gradients_of(ours, batch, seed)
            with_gradients = sum(counts)
            with torch.no_grad():
                ours.hidden_states(batch)

        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert distance(found[name], gradient) < tolerance, (name, tile, tokens)
        assert with_gradients == (passes if passes and tokens > tile else 2) * 2 * tokens  # layers
        assert sum(counts) == with_gradients + 2 * tokens
        assert max(counts) <= (tile if passes else tokens)


def test_a_reference_computes_long_batches_in_tiles(load, batch, monkeypatch):
    monkeypatch.setattr(layers, "TILE_TOKENS", 5)
    policy = load("llama", gradient_checkpointing=True, needs_reference=True)
    with policy.reference() as reference, tokens_computed(reference) as counts:
        reference.hidden_states(batch)
    assert max(counts) <= 5


@pytest.mark.gpu
def test_inputs_of_layers_wait_in_host_memory(load, samples, seed):
    plain, ours = (load("llama", device="cuda", gradient_checkpointing=how) for how in (False, "offload"))
    inputs = []
    for layer in layers.decoder_layers(ours.model):
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    (batch,) = pack(samples, max_tokens=10_000, device="cuda")

    weighted(ours.hidden_states(batch))

    assert inputs and not any(storage() is not None for storage in inputs)
    expected, found = (gradients_of(policy, batch, seed) for policy in (plain, ours))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_model_without_mlps_of_its_own_cannot_recompute_them(load):
    with pytest.raises(ValueError, match=r"model\.gradient_checkpointing = 'mlp': OPTForCausalLM has no MLP"):
        load("opt", gradient_checkpointing="mlp")


@pytest.fixture
def liger_interpreted(monkeypatch):
    """What the interpreter lacks: the device's mathematical functions, and numbers as tensors of float32."""
    pytest.importorskip("liger_kernel", reason="install liger-kernel")
    if torch.cuda.is_available():
        return
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    plain = interpreter._implicit_cvt

    def converted(value):
        if not isinstance(value, float):
            return plain(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 1 - 2 / (tl.exp(2 * x) + 1))


def outcome(model, ids):
    """Hidden states, and the gradient of every weight."""
    hidden = model.base_model(ids, use_cache=False).last_hidden_state.float()
    weighted(hidden).backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return hidden.detach(), torch.cat(gradients)


@pytest.mark.parametrize("kind", sorted(LIGER_TYPES))
@pytest.mark.drawn(5)
def test_liger_computes_a_layer_as_transformers_does(kind, liger_interpreted, device, seed, monkeypatch):
    """In float32 to rounding; in bfloat16 no further from float32 than transformers: it rounds as often."""
    torch.manual_seed(seed)
    ids = torch.randint(61, (1, 4), device=device)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads)).to(device)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    names = vars(sys.modules[type(model).__module__])
    for name, value in [*names.items()]:  # what Liger puts there is taken back
        monkeypatch.setitem(names, name, value)
    half = copy.deepcopy(model).bfloat16()
    (plain, right), own = (outcome(m, ids) for m in (model, copy.deepcopy(half).float())), outcome(half, ids)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", None)
    for changed in (model, half):
        changed.zero_grad()
        use_liger(changed)

    assert max(map(distance, outcome(model, ids), plain)) < 1e-5
    assert any("Liger" in module._get_name() for module in model.modules())
    assert torch.nn.functional.cross_entropy is None and "forward" not in vars(model)  # losses stay
    of_liger, of_own = (list(map(distance, found, right)) for found in (outcome(half, ids), own))
    assert of_liger[0] < 1.05 * of_own[0] and of_liger[1] < 3 * of_own[1]


# keys, device, type of model; Liger or why it is refused, torch.compile
CHOICES = [
    ({}, "cuda", "qwen2", True, False),
    ({}, "cuda", "olmo2", False, True),
    ({}, "cuda", "qwen3_moe", False, False),
    ({}, "cpu", "qwen2", False, False),
    ({"liger_kernels": False}, "cuda", "qwen2", False, True),
    ({"liger_kernels": True}, "cuda", "olmo2", True, False),
    ({"liger_kernels": False, "compile": False}, "cuda", "qwen2", False, False),
    ({"compile": True}, "cpu", "qwen3_moe", False, True),
    ({"liger_kernels": True}, "cuda", "cohere", "Liger has none for 'cohere'", False),
    ({"liger_kernels": True}, "cpu", "qwen2", "needs a CUDA device, not cpu", False),
]


@pytest.mark.parametrize(("keys", "device", "kind", "liger", "compiled"), CHOICES)
def test_liger_where_it_is_exact_and_torch_compile_elsewhere_on_a_gpu(keys, device, kind, liger, compiled):
    pytest.importorskip("liger_kernel", reason="install liger-kernel")
    config, plain = ModelConfig(path="-", **keys), kind != "qwen3_moe"
    if isinstance(liger, str):
        with pytest.raises(ValueError, match=rf"model\.liger_kernels = true.*{liger}"):
            resolve_liger(config, torch.device(device), kind)
        return
    assert resolve_liger(config, torch.device(device), kind) is liger
    assert resolve_compile(config, torch.device(device), liger=liger, plain=plain) is compiled


# With gradients and without; from transformers 5.24 on a layer and its attention share a wrapper.
@torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True)
def test_layers_are_compiled_once_for_batches_of_every_length(folder_of, samples, seed, monkeypatch):
    """Also if weights move to other memory, as vLLM's sharing moves them. Generation compiles nothing."""
    graphs = []
    monkeypatch.setattr(layers, "TILE_TOKENS", 20)

    def backend(graph, inputs, **_):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    path = str(folder_of("llama", num_hidden_layers=3))
    settings = {"path": path, "dtype": "float32", "device": "cpu", "gradient_checkpointing": "mlp"}
    plain, compiled = (load_policy(ModelConfig(**settings, compile=wanted)) for wanted in (False, True))
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()

    counts = []
    for some in (samples[:2], CompletionTable.join([samples] * 9), samples[:1]):
        (batch,) = pack(some, max_tokens=10**6, device="cpu")
        expected, found = (gradients_of(policy, batch, seed) for policy in (plain, compiled))
        for name, gradient in expected.items():
            assert distance(found[name], gradient) < 1e-4, name
        compiled.model.generate(batch.input_ids[None, : 4 + len(counts)], max_new_tokens=3)
        for weight in compiled.model.parameters():
            weight.data = torch.cat([weight.data.new_empty(64), weight.data.flatten()])[64:].view_as(weight)
        counts.append(len(graphs))

    assert counts[0] > 0 and counts == counts[:1] * 3


def test_a_compiled_reference_has_layers_of_its_own(load, batch, monkeypatch):
    called = []
    monkeypatch.setattr(
        torch, "compile", lambda forward, **_: lambda *a, **k: [called.append(0), forward(*a, **k)][1]
    )
    policy = load("llama", compile=True, needs_reference=True)
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
def test_compiled_layers_on_a_gpu_round_as_plain_ones_do(load, samples, checkpointing, lora):
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
