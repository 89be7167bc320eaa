"""vLLM on a policy's 4-bit tensors; that they agree after every update is tested in test_weights.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm.quantized import handed_out, register

bitsandbytes = pytest.importorskip("bitsandbytes")
SAMPLING = Sampling(max_completion_length=20, seed=11)
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12)]
ROWS = {"q": 12, "k": 8, "v": 8}


def test_it_generates_from_the_policys_own_tensors_and_leaves_them_as_they_were(
    saved_model, running_vllm, largest_difference, caplog
):
    options = {"dtype": "float32", "plain": False, "bits": "nf4", "lora": LoraConfig()}
    with running_vllm(saved_model(), **options) as (engine, policy):
        weights = [p for p in policy.model.parameters() if isinstance(p, bitsandbytes.nn.Params4bit)]
        before = [(weight.clone(), weight.quant_state.absmax.clone()) for weight in weights]
        layers = [vars(module) for module in engine._worker.get_model().modules()]
        used = [part.data_ptr() for layer in layers for part in layer.get("parts", ())]
        assert sorted(used) == sorted(weight.data_ptr() for weight in weights)
        full = sum(4 * weight.quant_state.shape.numel() for weight in weights)
        assert engine.memory()["weights"] < full / 2  # tables of positions
        assert "adapter (beside the 4-bit base of the policy); its log-probabilities are " in caplog.text
        for name, tensor in policy.base_weights().items():
            if name.endswith(".bias"):  # shared, too
                tensor.data.normal_(std=0.3)
        engine.sync(policy)
        groups = engine.generate(PROMPTS, 3, SAMPLING)
        assert engine.generate(PROMPTS, 3, SAMPLING) == groups

    assert largest_difference(policy, PROMPTS, groups) < 1e-2
    for weight, (packed, scales) in zip(weights, before, strict=True):
        assert torch.equal(weight, packed) and torch.equal(weight.quant_state.absmax, scales)


def test_a_fused_layer_is_its_parts_side_by_side_in_one_graph_and_refuses_what_are_not_its_rows(
    on_vllms_cpu, rng
):
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization import get_quantization_config

    layer = LinearBase.__new__(LinearBase)
    nn.Module.__init__(layer)
    layer.input_size, layer.output_size, layer.prefix = 64, sum(ROWS.values()), "qkv"
    method = get_quantization_config(register())().get_quant_method(layer, "qkv")
    parts = {name: torch.randn(rows, 64, generator=rng) for name, rows in ROWS.items()}  # k stays so
    for name in ("q", "v"):
        parts[name] = bitsandbytes.nn.Params4bit(parts[name], quant_type="nf4").to("cpu")
    given = dict(handed_out(parts))
    refused = pytest.raises(ValueError, match=r"qkv, 28 x 64,.*\(12, 64\), \(8, 64\).*share_weights to false")
    for names, outcome in (("vq", refused), ("vqk", nullcontext())):
        method.create_weights(layer, 64, [*ROWS.values()])
        for name in names:
            layer.weight.weight_loader(layer.weight, given[name], name)
        with outcome:
            method.process_weights_after_loading(layer)
    q, v = (bitsandbytes.functional.dequantize_4bit(parts[n], parts[n].quant_state) for n in ("q", "v"))
    weight, bias, graphs = torch.cat([q, parts["k"], v]), torch.randn(28, generator=rng), []

    with torch.inference_mode():
        run = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
        apply = torch.compile(method.apply, fullgraph=True, dynamic=True, backend=run)
        for tokens in (3, 17):
            x = torch.randn(tokens, 64, generator=rng)
            torch.testing.assert_close(apply(layer, x, bias), linear(x, weight, bias))
    assert len(graphs) == 1
