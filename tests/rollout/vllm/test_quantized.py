"""vLLM on a policy whose base has 4 bits: on the policy's own tensors, or on a copy in full precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm.quantized import handed_out, register

bitsandbytes = pytest.importorskip("bitsandbytes")
SAMPLING = Sampling(max_completion_length=20, seed=11)
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12), tuple(3 + i % 26 for i in range(140))]
ROUNDING = 1e-2  # nats, as in test_weights.py
OPTIONS: dict[str, Any] = {"dtype": "float32", "bits": "nf4", "lora": LoraConfig(r=4, alpha=16.0)}
ROWS = {"q": 12, "k": 8, "v": 8}


def packed(model: nn.Module) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, bitsandbytes.nn.Params4bit)}


def step(engine, policy, shake, largest_difference) -> float:
    """Nats between policy and engine after an update."""
    engine.sleep()
    shake(policy, 0.2)
    engine.sync(policy)
    engine.wake()
    return largest_difference(policy, PROMPTS, engine.generate(PROMPTS, 3, SAMPLING))


def test_it_generates_from_the_policys_own_4_bit_tensors_and_leaves_them_as_they_were(
    saved_model, running_vllm, shake, largest_difference, caplog
):
    with running_vllm(saved_model(), plain=False, **OPTIONS) as (engine, policy):
        weights = packed(policy.model)
        before = {
            name: (weight.clone(), weight.quant_state.absmax.clone()) for name, weight in weights.items()
        }
        linears = [module for module in engine._worker.get_model().modules() if "parts" in vars(module)]
        parts = {part.data_ptr() for module in linears for part in module.parts}
        assert len(linears) == 2 * 4 and parts == {weight.data_ptr() for weight in weights.values()}
        full = sum(4 * weight.quant_state.shape.numel() for weight in weights.values())
        assert engine.memory()["weights"] < full / 2  # tables of positions, and no linear layer
        assert "adapter (beside the 4-bit base of the policy); its log-probabilities are" in caplog.text

        old = engine.generate(PROMPTS, 3, SAMPLING)
        assert largest_difference(policy, PROMPTS, old) < ROUNDING
        assert engine.generate(PROMPTS, 3, SAMPLING) == old
        with torch.no_grad():
            for name, tensor in policy.base_weights().items():
                if name.endswith(".bias"):  # shared, too
                    tensor.normal_(std=0.3)
        for _ in range(2):
            assert step(engine, policy, shake, largest_difference) < ROUNDING
        assert largest_difference(policy, PROMPTS, old) > 2 * ROUNDING
        new = engine.generate(PROMPTS, 3, SAMPLING)

    assert largest_difference(policy, PROMPTS, new) < ROUNDING
    for name, weight in weights.items():
        assert torch.equal(weight, before[name][0]), name
        assert torch.equal(weight.quant_state.absmax, before[name][1]), name


def test_a_copy_of_its_own_holds_the_numbers_that_4_bits_stand_for(
    saved_model, running_vllm, shake, largest_difference, caplog
):
    options = {"plain": True, "share_weights": False}
    with running_vllm(saved_model(), **options, **OPTIONS) as (engine, policy):
        assert "full precision, for rollout.vllm.share_weights = false); its" in caplog.text
        own, weights = dict(engine._worker.get_model().named_parameters()), dict(policy.named_weights())
        down = "model.layers.1.mlp.down_proj"
        base = dict(policy.named_weights(adapters=False))[f"{down}.weight"]
        assert torch.equal(own[f"{down}.base_layer.weight"], base)
        assert step(engine, policy, shake, largest_difference) < ROUNDING
        assert not torch.equal(weights[f"{down}.weight"], dict(policy.named_weights())[f"{down}.weight"])


@pytest.fixture
def fused(on_vllms_cpu, rng):
    """vLLM's layer, its method and the policy's parts, one of which is not quantised."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization import get_quantization_config

    layer = LinearBase.__new__(LinearBase)
    nn.Module.__init__(layer)
    layer.input_size, layer.output_size, layer.prefix = 64, sum(ROWS.values()), "attention.qkv"
    method = get_quantization_config(register())().get_quant_method(layer, layer.prefix)
    method.create_weights(layer, 64, list(ROWS.values()), params_dtype=torch.float32)
    parts: dict[str, Any] = {name: torch.randn(rows, 64, generator=rng) for name, rows in ROWS.items()}
    for name in ("q", "v"):
        parts[name] = bitsandbytes.nn.Params4bit(parts[name], quant_type="nf4").to("cpu")
    return layer, method, parts


def load(layer: Any, parts: dict[str, Any]) -> None:
    for name, weight in reversed(list(handed_out(parts))):
        layer.weight.weight_loader(layer.weight, weight, name)


def test_a_fused_layer_is_its_parts_side_by_side_in_one_graph_for_any_number_of_tokens(fused, rng):
    layer, method, parts = fused
    load(layer, parts)
    method.process_weights_after_loading(layer)
    full = [bitsandbytes.functional.dequantize_4bit(parts[n], parts[n].quant_state) for n in ("q", "v")]
    weight, bias = torch.cat([full[0], parts["k"], full[1]]), torch.randn(28, generator=rng)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.inference_mode():
        apply = torch.compile(method.apply, fullgraph=True, dynamic=True, backend=backend)
        for tokens in (3, 17):
            x = torch.randn(tokens, 64, generator=rng)
            torch.testing.assert_close(apply(layer, x, bias), linear(x, weight, bias))

    assert len(graphs) == 1


def test_weights_that_are_not_rows_of_vllms_are_refused_with_the_remedy(fused):
    layer, method, parts = fused
    del parts["k"]
    load(layer, parts)
    with pytest.raises(
        ValueError, match=r"attention\.qkv, 28 x 64.*\(12, 64\), \(8, 64\).*share_weights to false"
    ):
        method.process_weights_after_loading(layer)
