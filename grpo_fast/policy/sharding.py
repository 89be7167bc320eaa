"""Mode `shard`: each rank keeps its rows of every weight, and FSDP2 gathers a layer's while it computes.

Gradients are sums over ranks in float32: losses are divided by the counts of all ranks. Each layer is a unit
of FSDP2, and so are embedding and head, unless they are tied: a weight of two units would be two weights.
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
    """A model whose weights are divided over ranks. Read them only within `run`, on all ranks.

    No device ever holds the whole model: FSDP2 moves each layer there and keeps this rank's rows. `base` is
    the transformers model in `model`. ValueError if FSDP2 does not support a weight.
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
            problem = f"finds no layers of transformers in {type(base).__name__}"
            raise ValueError(f"distributed.mode = 'shard' {problem}; give replicate, or another model")
        tied = embedding.weight is self.head.weight
        tables = [] if tied else [embedding, self.head]
        for unit in (*layers, *tables, self):
            shared: Any = fully_shard(
                unit, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
            )
            shared.set_gradient_divide_factor(1.0)
            shared.set_force_sum_reduction_for_comms(True)  # gloo cannot average

    def forward(self, work: Callable[[], T]) -> T:
        if isinstance(self.head, FSDPModule):
            self.head.unshard()
        return work()

    def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, with each layer gathered when it is called. A backward may follow."""
        result: T = self(work)
        if not torch.is_grad_enabled():  # else the backward does
            for unit in (self, self.head):
                if isinstance(unit, FSDPModule):
                    unit.reshard()
        return result


def _require_shardable(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if len(dtypes) > 1:
        problem = f"trained weights are of several types, {', '.join(sorted(map(str, dtypes)))}"
    elif scalars := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
        problem = f"{scalars[0]} is a single number, which has no rows"
    elif experts := _experts_in_lists(layers):
        problem = (
            f"{experts[0]} and others of its layer are experts in a list, which ranks choose differently"
        )
    else:
        return
    raise ValueError(f"distributed.mode = 'shard' cannot divide the model: {problem}; give replicate")


def _experts_in_lists(layers: Iterable[nn.Module]) -> list[str]:
    """Return the types of trained experts with separate weights, which a rank's tokens may not reach."""
    containers = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
    lists = [m for layer in layers for m in layer.modules() if isinstance(m, containers) and len(m) > 1]
    trained = [one for one in lists if any(p.requires_grad for p in one.parameters())]
    return [type(next(iter(one.children()), one)).__name__ for one in trained]
