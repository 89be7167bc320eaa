"""vLLM on a policy's 4-bit tensors; that they agree after every update is tested in test_weights.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from grpo_fast.rollout.vllm.quantized import handed_out, register

bitsandbytes = pytest.importorskip("bitsandbytes")
ROWS = {"q": 12, "k": 8, "v": 8}


def test_a_fused_layer_is_its_parts_in_one_graph_and_refuses_other_rows(on_vllms_cpu, rng):
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
