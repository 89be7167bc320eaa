"""Weights into vLLM: a loader watched on a model that does all that engines do, then a real vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_fast.config.policy import LoraConfig
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm import start
from grpo_fast.rollout.vllm.weights import (
    Placement,
    WeightSync,
    checkpoint_weights,
    share,
    storage_of,
    watch_loading,
)
from tests.tiny import tiny_config, tiny_model

WIDTH, ROWS, PADDED = 4, 6, 8
SIZES = {"q": 4, "k": 2, "v": 2}
Weights = dict[str, nn.Parameter]


class Engine(nn.Module):
    """`qkv` is fused, `embed` padded and tied to `head`, `slice` half of a weight, `up` gets packed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(sum(SIZES.values()), WIDTH))
        self.embed = nn.Parameter(torch.zeros(PADDED, WIDTH))
        self.head = self.embed
        self.down = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.slice = nn.Parameter(torch.zeros(WIDTH, WIDTH // 2))
        self.up = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        starts = {"q": 0, "k": SIZES["q"], "v": SIZES["q"] + SIZES["k"]}
        for name, weight in weights:
            if name in starts:
                self.qkv.data.narrow(0, starts[name], SIZES[name]).copy_(weight)
            elif name == "embed":
                self.embed.data[:ROWS].copy_(weight)
            elif name == "slice":
                self.slice.data.copy_(weight[:, WIDTH // 2 :])
            else:
                getattr(self, name).data.copy_(weight)


@pytest.fixture
def weights(rng) -> Weights:
    shapes = {name: (rows, WIDTH) for name, rows in SIZES.items()}
    shapes |= {"embed": (ROWS, WIDTH), **dict.fromkeys(("down", "slice", "up"), (WIDTH, WIDTH))}
    return {name: nn.Parameter(torch.randn(shape, generator=rng)) for name, shape in shapes.items()}


TEXT: Any = nn.Module()
TEXT.config = SimpleNamespace(model_type="llama")


@pytest.fixture
def engine() -> Engine:
    return Engine()


def policy_of(weights: dict[str, Tensor], changing: set[str], model: Any = TEXT) -> Any:
    return SimpleNamespace(
        base_model=model,
        named_weights=lambda adapters=True: iter(weights.items()),
        base_weights=lambda: weights,
        changing_weights=lambda: changing,
        sharded=False,
        device=torch.device("cpu"),
    )


def detached(weights: Weights) -> list[tuple[str, Tensor]]:
    return [(name, weight.detach()) for name, weight in weights.items()]


def watch(engine: Engine, weights: Weights) -> list[Placement]:
    return watch_loading(engine.load_weights, detached(weights))


def test_shared_weights_are_one_memory_and_keep_their_values_and_identities(engine, weights):
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    own = {parameter.data_ptr() for parameter in engine.parameters()}

    shared = share(engine, weights, watch(engine, weights))

    aliased = {place.name for place in shared if place.aliases(weights[place.name])}
    assert aliased == set(weights) - {"slice"}  # of which the engine has a slice
    assert {parameter.data_ptr() for parameter in engine.parameters()} == own  # no new memory
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert all(weight.is_contiguous() for weight in weights.values())
    assert engine.head is engine.embed
    assert torch.equal(engine.embed[ROWS:], torch.zeros(PADDED - ROWS, WIDTH))
    with torch.no_grad():
        for weight in weights.values():
            weight.mul_(3)
    assert torch.equal(engine.qkv, 3 * torch.cat([before[name] for name in SIZES]))
    assert torch.equal(engine.head[:ROWS], 3 * before["embed"])
    assert torch.equal(engine.down, 3 * before["down"])
    assert torch.equal(engine.slice, before["slice"][:, WIDTH // 2 :])


def test_weights_shared_in_inference_mode_can_be_trained(weights):
    with torch.inference_mode():
        engine = Engine()  # its own tensors could not
        share(engine, weights, watch(engine, weights))

    for weight in weights.values():
        assert not weight.is_inference()
        weight.square().sum().backward()
        with torch.no_grad():
            weight -= weight.grad
    assert storage_of(engine.qkv) == storage_of(weights["q"])


@pytest.mark.parametrize("fault", ["another dtype", "another layout", "loaded twice", "transformed"])
def test_another_dtype_layout_or_value_or_a_second_place_is_not_shared(engine, weights, fault):
    name = "down"
    if fault == "another dtype":
        weights["down"] = nn.Parameter(weights["down"].data.double())
    elif fault == "another layout":
        name, weights["q"] = "q", nn.Parameter(weights["q"].data.T.contiguous().T)
    places = watch(engine, weights)
    if fault == "loaded twice":
        down = next(place for place in places if place.name == "down")
        places.append(replace(down, target=torch.empty_like(down.target)))
    elif fault == "transformed":  # by a loader that goes on where it has copied
        name, before = "q", weights["q"].detach().clone()
        engine.qkv.data[: SIZES["q"]].exp_().neg_()

    shared = share(engine, weights, places)

    assert not any(place.aliases(weights[place.name]) for place in shared if place.name == name)
    if fault == "transformed":
        assert torch.equal(weights["q"], before)
        assert torch.equal(engine.qkv[: SIZES["q"]], -before.exp())


class Loaded(nn.Module):
    """A model of one weight and the engine around it, that may handle the weight in its own way.

    Args:
        fault: `scaled` while it is copied, `repacked` after loading, `moved` or `changed` by a reload; or the
            model has `latent` attention.
    """

    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.model_config = SimpleNamespace(use_mla=fault == "latent")
        self.fault = fault

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            self.weight.data.copy_(2 * weight if self.fault == "scaled" else weight)
        if self.fault == "repacked":
            self.weight.data = self.weight.data.clone()

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        if self.fault == "moved":
            self.weight.data = self.weight.data.clone()
        self.load_weights(kwargs["weights_iterator"])
        if self.fault == "changed":
            self.weight.data[0, 0] += 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, "a copy of weight"),
        ("latent", "derives weights"),
        ("scaled", "weight is not loaded by plain copies"),
        ("repacked", "weight is repacked after loading"),
        ("moved", "weight is repacked after vLLM's own reload"),
        ("changed", "weight is transformed after vLLM's own reload"),
    ],
)
def test_copies_are_made_only_where_they_reach_everything_that_is_read(fault, reason):
    weight, engine = nn.Parameter(torch.arange(6.0).view(2, 3)), Loaded(fault)
    policy = policy_of({"weight": weight.detach()}, {"weight"})
    places = watch_loading(engine.load_weights, policy.named_weights())

    sync = WeightSync(engine, engine, policy, places, adapters=False)
    with torch.no_grad():
        weight += 1
    engine.fault = None
    sync(everything=False)

    assert (sync.way, reason in sync.reason) == ("portable" if fault else "direct", True)
    assert torch.equal(engine.weight, weight)


def test_what_a_reload_leaves_out_is_copied_after_it():
    """A loader copies past the one that the reload watches, as of gpt-oss's sinks."""
    engine = Loaded("repacked")
    engine.sinks, engine.scale = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    weights = {name: torch.rand(like.shape) for name, like in engine.named_parameters()}
    policy = policy_of(weights, {"weight", "scale"})

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in given:
            if not (engine.reloads and name == "sinks"):
                engine.get_parameter(name).data.copy_(weight)
        engine.weight.data = engine.weight.data.clone()

    engine.load_weights, engine.reloads = load, False
    places = watch_loading(engine.load_weights, policy.named_weights())
    engine.scale.data = weights["scale"]  # one memory
    engine.reloads = True

    sync = WeightSync(engine, engine, policy, places, adapters=False)
    for weight in weights.values():
        assert weight.isfinite().all()
        weight.add_(1)
    sync(everything=False)

    assert sync.way == "portable"
    assert all(torch.equal(engine.get_parameter(name), weight) for name, weight in weights.items())


def test_experts_are_sent_one_by_one_under_the_names_of_a_checkpoint(tmp_path, seed):
    small = {"num_experts": 3, "moe_intermediate_size": 8, "head_dim": 4, "hidden_size": 16, "vocab_size": 20}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, intermediate_size=8, **small))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")

    sent = dict(checkpoint_weights(policy_of(model.state_dict(), set(), model)))

    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in saved.items())


def test_gpt_oss_experts_are_sent_one_by_one_though_published_fused():
    config = tiny_config("gpt_oss")
    model = tiny_model(config)
    stack = model.state_dict()["model.layers.0.mlp.experts.down_proj"]

    sent = dict(checkpoint_weights(policy_of(model.state_dict(), set(), model)))

    assert torch.equal(sent["model.layers.0.mlp.experts.2.down_proj"], stack[2])
    assert not any(name.endswith("experts.down_proj") for name in sent)


SAMPLING = Sampling(max_completion_length=20, seed=11)
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12), tuple(3 + i % 26 for i in range(140))]
# Nats. float32: two orders of summation, of weights that have been shaken three times: 1.1e-3 was seen.
# bfloat16: 8 bits in each of some 10 roundings on the way to logits of size 10 or so. An older set of
# weights, or a mixture of two, is nats away.
ROUNDING = {"float32": 1e-2, "bfloat16": 0.3}
LORA = LoraConfig(r=4, alpha=16.0)
NF4 = {"dtype": "float32", "lora": LORA, "bits": "nf4"}
WAYS = {
    "shared": {"dtype": "float32"},
    "direct": {"dtype": "bfloat16", "share_weights": False, "fp32_head": True},
    "lora merged": {"dtype": "float32", "lora": LORA},
    "lora adapter": {"dtype": "float32", "lora": LORA, "lora_sync": "adapter"},
    "4 bits, adapter": NF4,
    "copy of 4 bits, adapter": NF4 | {"share_weights": False},
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.drawn(2)
def test_after_every_sync_it_computes_what_the_policy_computes(
    name, saved_model, running_vllm, rng, shake, largest_difference, caplog, monkeypatch
):
    options = WAYS[name]
    noise = ROUNDING[options["dtype"]]
    spy = Mock(wraps=start.waiting_on_host)
    monkeypatch.setattr(start, "waiting_on_host", spy)
    with running_vllm(saved_model(), **options) as (engine, policy):
        shares = name in ("shared", "lora adapter", "4 bits, adapter")
        assert bool(spy.call_args[0][0]) == shares  # these wait on the host while vLLM builds its model
        way = "adapter" if "adapter" in name else "shared" if name == "shared" else "direct"
        assert engine._sync.way == way, engine._sync.reason
        assert ("(with its own base in full precision, as " in caplog.text) == ("copy" in name)
        packed = [weight for weight in policy.model.parameters() if hasattr(weight, "quant_state")]
        kept = [(weight.clone(), weight.quant_state.absmax.clone()) for weight in packed]
        if name == "4 bits, adapter":
            require_own_tensors(engine, packed, caplog.text)
            for weight, tensor in policy.base_weights().items():
                if weight.endswith(".bias"):  # shared, too
                    tensor.data.normal_(std=0.3)
            engine.sync(policy)
        before = engine.generate(PROMPTS, 3, SAMPLING)
        assert largest_difference(policy, PROMPTS, before) < noise
        for _ in range(3):
            shake(policy, 0.2 if policy.has_adapters else 0.05)
            engine.sleep()
            engine.sync(policy)
            engine.wake()
            after = engine.generate(PROMPTS, 3, SAMPLING)
            assert largest_difference(policy, PROMPTS, after) < noise
        assert largest_difference(policy, PROMPTS, before) > 2 * noise
        if options.get("fp32_head"):
            hidden = torch.randn(3, policy.head.weight.shape[1], generator=rng).bfloat16()
            with torch.no_grad():
                logits = engine._worker.get_model().compute_logits(hidden)
            torch.testing.assert_close(logits, policy.head.logits(hidden))
        last = [weight.detach().clone() for weight in policy.trainable().values()]
    assert all(map(torch.equal, policy.trainable().values(), last))  # shared ones outlive the engine
    for weight, (bits, scales) in zip(packed, kept, strict=True):
        assert torch.equal(weight, bits) and torch.equal(weight.quant_state.absmax, scales)


def require_own_tensors(engine: Any, packed: list[Any], told: str) -> None:
    """Check that vLLM multiplies with these very tensors, and has little else."""
    model = engine._worker.get_model()
    used = [part.data_ptr() for module in model.modules() for part in vars(module).get("parts", ())]
    assert sorted(used) == sorted(weight.data_ptr() for weight in packed)
    assert not any(weight.numel() for name, weight in model.named_parameters() if "proj.weight" in name)
    assert "adapter (with the 4-bit base of the policy); its log-probabilities are " in told


LINEAR = LORA.model_copy(update={"target_modules": ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj"]})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("granitemoehybrid", "falcon_h1", "nemotron_h")),
        ("falcon_h1", {"share_weights": False}),
        ("falcon_h1", {"lora": LINEAR}),
        *((kind, {"lora": LINEAR, "lora_sync": "adapter"}) for kind in ("falcon_h1", "nemotron_h")),
    ],
)
@pytest.mark.drawn(2)
def test_hybrids_compute_what_the_policy_does_after_every_sync(
    kind, options, saved_kind, running_vllm, shake, largest_difference
):
    noise, folder = 1e-3, saved_kind(kind)  # 2.3e-5 was seen
    with running_vllm(folder, dtype="float32", **options) as (engine, policy):
        assert engine._sync.way == ("adapter" if "lora_sync" in options else "portable")
        before = engine.generate(PROMPTS, 3, SAMPLING)
        assert largest_difference(policy, PROMPTS, before) < noise
        for _ in range(2):
            shake(policy, 0.2 if policy.has_adapters else 0.05)
            engine.sleep()
            engine.sync(policy)
            engine.wake()
            after = engine.generate(PROMPTS, 3, SAMPLING)
            assert largest_difference(policy, PROMPTS, after) < noise
        assert largest_difference(policy, PROMPTS, before) > 2 * noise
    if not options:  # vLLM keeps -exp(A_log) of a Mamba layer
        with pytest.raises(ValueError, match=r"share_weights = true: .*A_log is "):
            running_vllm(folder, dtype="float32", share_weights=True).__enter__()
