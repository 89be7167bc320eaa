"""Mode `shard`: each rank keeps its rows of every weight, and FSDP2 gathers a layer's while it computes.

Gradients are sums over ranks, as losses are divided by the counts of all ranks, and are summed in float32.
Each layer is a unit that is gathered by itself. So are both vocabulary tables, the largest weights, unless
they are one: then both modules lie in the root's unit, because a weight of two units would be two weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from grpo_fast.distributed.world import World
from grpo_fast.policy.layers import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


class ShardedModel(nn.Module):
    """A model's weights over ranks. What reads them runs in `run`, on all ranks alike.

    Each layer goes to the device whole and stays there in rows, so that no device ever holds the model.

    Args:
        model: with its adapters, on the CPU or the device.
        base: the transformers model in it.

    Raises:
        ValueError: a model whose weights FSDP2 cannot hold; the message says why.
    """

    def __init__(self, model: nn.Module, base: PreTrainedModel, world: World) -> None:
        super().__init__()
        layers = decoder_layers(base)
        _require_shardable(model, layers)
        self.model = model
        self.world = world
        self.head: nn.Module = base.get_output_embeddings()
        embedding: Any = base.get_input_embeddings()
        if not layers:
            raise ValueError(
                f"distributed.mode = 'shard' finds no layers in {type(base).__name__} to gather one by one; "
                "give replicate, or a model that transformers itself implements"
            )
        tied = embedding.weight is self.head.weight
        tables = [] if tied else [embedding, self.head]
        for unit in (*layers, *tables, self):
            shared: Any = fully_shard(
                unit, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
            )
            shared.set_gradient_divide_factor(1.0)
            shared.set_force_sum_reduction_for_comms(True)  # gloo scales nothing

    def forward(self, work: Callable[[], T]) -> T:
        if isinstance(self.head, FSDPModule):
            self.head.unshard()
        return work()

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, with layers gathered as they are called; a backward may follow."""
        result: T = self(work)
        if not torch.is_grad_enabled():  # else the backward does
            for unit in (self, self.head):
                if isinstance(unit, FSDPModule):
                    unit.reshard()
        return result


def _require_shardable(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if len(trained) > 1:
        found = f"trained weights are of several types, {', '.join(sorted(map(str, trained)))}"
    elif scalars := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
        found = f"{scalars[0]} is a single number, which has no rows"
    elif experts := _chosen(layers):
        found = f"{experts[0]} and others of its layer are experts in a list, which ranks choose differently"
    else:
        return
    raise ValueError(f"distributed.mode = 'shard' cannot divide the model: {found}; give replicate")


_CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict


def _chosen(layers: Iterable[nn.Module]) -> list[str]:
    """Trained experts with weights of their own each: a rank's tokens may not reach all."""
    held = [m for layer in layers for m in layer.modules() if isinstance(m, _CONTAINERS) and len(m) > 1]
    trained = [one for one in held if any(p.requires_grad for p in one.parameters())]
    return [type(next(iter(one.children()), one)).__name__ for one in trained]
