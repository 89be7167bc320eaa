"""Where vLLM's own code leaves something out: that for CPUs, and its reload of weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn


def repair(model: Any, device_type: str) -> None:
    """Before weights are loaded.

    Phi-3.5-MoE gets its head's bias. On a CPU other code of vLLM's own is used: its router takes other scores
    than a softmax, and the bias that experts are chosen by, where experts have groups, and one group is the
    same choice; its kernel for rotary positions takes rows, and latent attention and LFM2 give it heads.
    """
    for parameter in model.parameters():  # as of MiniMax M2's norms: the reload asks loaders for their names
        if isinstance(loader := getattr(parameter, "weight_loader", None), partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]
    if type(model).__name__ == "PhiMoEForCausalLM" and model.config.lm_head_bias:
        head, logits = model.lm_head, model.logits_processor
        model.compute_logits = lambda hidden: logits(head, hidden, head.bias)
    for module in model.modules() if device_type == "cpu" else ():
        router: Any = getattr(module, "router", None)
        if getattr(router, "e_score_correction_bias", None) is not None and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
        rotary: Any = getattr(module, "rotary_emb", None)
        if hasattr(rotary, "forward_native"):
            rotary._forward_method = rotary.forward_native


def packed_ties(model: nn.Module) -> list[Any]:
    """Modules with a packed copy, as CPUs use, of a weight that is loaded under another module's name.

    vLLM's reload packs again where it loads; a head tied to the embedding it would leave as it was.
    """
    seen: set[int] = set()
    ties = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.numel():
            if id(weight) in seen and hasattr(module, "cpu_linear"):
                ties.append(module)
            seen.add(id(weight))
    return ties


def packed_experts(model: nn.Module) -> list[Any]:
    """What packs each layer's experts, as CPUs do.

    Where one has its kernel, vLLM's reload leaves out the packing, for CUDA graphs have captured addresses.
    Without the kernel it packs the new weights as it has packed the first.
    """
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    found = {id(method): method for method in methods if getattr(method, "moe_kernel", None) is not None}
    return [*found.values()]
