"""The most probable entries of each row, found chunk by chunk. For inspection: no gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fast.head.call import HeadCall, Shard

_CHUNK_ENTRIES = 32 << 20


@torch.no_grad()
def top_entries(call: HeadCall, logsumexp: Tensor, k: int, shard: Shard | None) -> tuple[Tensor, Tensor]:
    """Ids (N, k) int64 and log-probabilities (N, k), most probable first; -1 and 0 in ignored rows.

    Args:
        logsumexp: (N,) over the whole vocabulary.
        shard: when `call.weight` is one of several.

    Raises:
        ValueError: `k` is no number of entries of the vocabulary.
    """
    vocabulary = call.vocabulary if shard is None else int(shard.vocabulary)
    if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= vocabulary:
        raise ValueError(f"topk must be 0 for none, or a number of the {vocabulary} entries, got {k!r}")
    values, ids = _local_top(call, k)
    if shard is not None:
        values, ids = _select(_gather(values, shard.group), _gather(ids + shard.start, shard.group), k)
    ignored = (call.targets < 0)[:, None]
    return ids.masked_fill(ignored, -1), (values - logsumexp[:, None]).masked_fill(ignored, 0)


def _local_top(call: HeadCall, k: int) -> tuple[Tensor, Tensor]:
    rows = call.hidden.shape[0]
    width = max(k, _CHUNK_ENTRIES // max(rows, 1))
    values = call.hidden.new_empty((rows, 0), dtype=call.accumulator)
    ids = call.targets.new_empty((rows, 0))
    for start in range(0, call.vocabulary, width):
        z = call.logits(slice(start, min(start + width, call.vocabulary)))
        columns = torch.arange(start, start + z.shape[1], device=z.device).expand(z.shape)
        values, ids = _select(torch.cat([values, z], 1), torch.cat([ids, columns], 1), k)
    return values, ids


def _select(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, where = values.topk(min(k, values.shape[1]), dim=1)
    return best, ids.gather(1, where)


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, 1)
