"""What decoder layers hold from a forward to its backward, in bytes a token.

Autograd itself says what it keeps of a forward on the meta device, so no architecture needs a formula. What
is there only for a moment is derived from that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from grpo_fast.policy import layers as running
from grpo_fast.policy.adapters import expert_adapters
from grpo_fast.policy.layers import decoder_layers, layer_mlps, token_wise_mlps

_FEW, _MANY = 256, 512  # tokens of two forwards, whole chunks of a scan: their difference is linear

Place = tuple[int | None, bool]
"""A layer's number, None outside of all, and whether it is in the layer's MLP."""


@dataclass(frozen=True)
class LayersPrice:
    """Bytes of one token."""

    outside: float  # kept before and after the layers
    layers: tuple[float, ...]  # kept by each, without its MLP
    mlps: tuple[float, ...]  # kept by each layer's MLP, its input included
    input: int  # of a layer's input
    tiled: bool  # MLPs that are recomputed can be computed in tiles
    pairs: tuple[float, ...]  # kept by each layer's own attention for a pair of tokens of one row
    merged: tuple[int, ...] = ()  # of each layer's experts with what adapters add: whole, whatever the tokens
    merging: int = 0  # of one layer's, with the gradient of one of these tensors, at the highest

    def kept(self, recomputes: Any, tokens: int) -> float:
        """From the forward to the backward, with `model.gradient_checkpointing` as it is."""
        inputs: float = len(self.layers) * self.input
        if recomputes == "offload":
            inputs = min(2, len(self.layers)) * self.input  # the others wait on the host
        elif recomputes == "mlp":
            inputs += sum(self.layers)
        elif not recomputes:
            inputs = sum(self.layers) + sum(self.mlps)
        return tokens * (self.outside + inputs) + sum(self.merged) * (not recomputes)

    def layer(self, recomputes: Any, tokens: int, attention: float) -> float:
        """While one layer's backward runs: what is computed again, and what the backward makes meanwhile.

        Args:
            attention: bytes of the attention's backward, in which what comes behind it is gone already.
        """
        tile = min(tokens, running.TILE_TOKENS) if self.tiled and recomputes else tokens
        again, mlp = 0.0, max(self.mlps, default=0.0)
        if recomputes:
            again = tokens * max(self.layers, default=0.0) * (recomputes != "mlp")
        in_mlp = tile * mlp * (1.25 if recomputes else 0.25) + 2 * self.input * tokens
        in_mlp += self.merging - max(self.merged, default=0) * (not recomputes)
        return again + max(in_mlp, attention)

    def forward(self, tokens: int) -> float:
        """The most at one time of a forward without gradients."""
        return tokens * (max(self.mlps, default=0.0) + 2 * self.input) + max(self.merged, default=0)


def price_layers(model: Any, backbone: nn.Module, *, fused: bool, own_attention: bool = False) -> LayersPrice:
    """Of a model on the meta device that recomputes nothing.

    Args:
        backbone: the model without its head; its attention is `priced_attention`.
        own_attention: it is the model's own, which keeps something for each pair of a row's tokens.
        fused: norms and gated MLPs keep what they read and no more, as Liger's kernels and torch.compile do.
    """
    few, many = (_kept(model, backbone, tokens, fused, own_attention) for tokens in (_FEW, _MANY))
    slope = {place: (many[place] - few[place]) / (_MANY - _FEW) for place in many}
    pair = dict.fromkeys(slope, 0.0)
    if own_attention:  # a parabola through both and zero
        pair = {p: (many[p] / _MANY - few[p] / _FEW) / (_MANY - _FEW) for p in many}
        slope = {place: few[place] / _FEW - pair[place] * _FEW for place in many}
    head = model.get_output_embeddings().weight
    count = len(decoder_layers(model))
    merged = [_merged(layer) for layer in decoder_layers(model)]
    return LayersPrice(
        slope.get((None, False), 0.0),
        tuple(slope.get((number, False), 0.0) for number in range(count)),
        tuple(slope.get((number, True), 0.0) for number in range(count)),
        head.shape[1] * head.element_size(),
        tiled=bool(token_wise_mlps(model)),
        pairs=tuple(pair.get((number, False), 0.0) for number in range(count)),
        merged=tuple(map(sum, merged)),
        merging=max(
            (sum(sizes[:n]) + size for sizes in merged for n, size in enumerate(sizes, 1)), default=0
        ),
    )


def computed(backbone: nn.Module, tokens: int, *, own_attention: bool, **options: Any) -> Any:
    """What a model on the meta device returns of a row.

    Raises:
        ValueError: it reads numbers, of which there are none.
    """
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    side = tokens if own_attention else 1  # a tiny mask keeps transformers from making its own T × T
    four = torch.ones(1, 1, side, side, dtype=torch.bool, device="meta")
    ways = [{"position_ids": ids, "attention_mask": four}]
    if own_attention:
        ways += [{"attention_mask": four[0, 0, :1]}, {"position_ids": ids, "attention_mask": four[0, 0, :1]}]
    for given in ways:
        try:
            return backbone(input_ids=ids, **given, **options)
        except Exception as failure:
            problem = str(failure).strip().splitlines()[0].partition(". ")[0].rstrip(".")
    raise ValueError(
        f"{type(backbone).__name__} cannot be planned, as its forward does not run without numbers "
        f"({problem}); set rollout.num_generations and micro_batch_tokens"
    )


def _merged(layer: nn.Module) -> list[int]:
    """Bytes of each tensor of experts that adapters are added to, in the order in which it is used: gate and
    up are wider than down."""
    return sorted((one.get_param().nbytes for one in expert_adapters(layer)), reverse=True)


def _kept(model: Any, backbone: nn.Module, tokens: int, fused: bool, own_attention: bool) -> Counter[Place]:
    """Bytes that autograd keeps of a forward, each storage where it is first kept."""
    found: Counter[Place] = Counter()
    known: dict[int, Any] = {}  # storages; held, so that no other takes their place
    place: Place = (None, False)
    in_norm = False
    places: dict[nn.Module, Place] = {}
    for number, layer in enumerate(decoder_layers(model)):
        places |= {layer: (number, False)} | dict.fromkeys(layer_mlps(layer), (number, True))
    modules = [*model.modules()] if fused else []
    norms = {module for module in modules if type(module).__name__.endswith("RMSNorm")}
    gates = {getattr(module, "act_fn", None) for module in modules if hasattr(module, "gate_proj")}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known[storage._cdata] = storage
            found[place] += storage.nbytes()

    def keep(tensor: Tensor) -> Tensor:
        if not in_norm:
            note(tensor)
        return tensor

    def begins(module: nn.Module, given: tuple[Any, ...]) -> None:
        nonlocal place, in_norm
        place = places.get(module, place)
        if module in norms:
            in_norm = True
            note(given[0])
            found[place] += 4 * given[0].shape[:-1].numel()

    def ends(module: nn.Module, _: Any, result: Any) -> None:
        nonlocal place, in_norm
        if module in places:
            number, in_mlp = places[module]
            place = (number if in_mlp else None, False)
        elif module in norms:
            in_norm = False
        elif module in gates:
            found[place] -= result.nbytes  # computed again in the backward

    for tensor in (*model.parameters(), *model.buffers()):
        known[tensor.untyped_storage()._cdata] = tensor
    hooks = register_module_forward_pre_hook(begins), register_module_forward_hook(ends)
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            computed(backbone, tokens, own_attention=own_attention, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
