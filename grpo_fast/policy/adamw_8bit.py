"""bitsandbytes' AdamW with 8-bit moments, which leave and come back as float32 values, to the bit.

Dettmers et al. 2022, arXiv:2110.02861: a moment's number is one of 256 values of a table, times the largest
magnitude of its block of 256 numbers. Tensors of fewer than 4,096 numbers keep float32 moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes import optim
from bitsandbytes.functional import dequantize_blockwise
from torch import Tensor

BLOCK, SMALLEST = 256, 4096
MOMENTS = (("1", "exp_avg", "dynamic"), ("2", "exp_avg_sq", "udynamic"))  # here, in torch's AdamW, its table


class AdamW8bit(optim.AdamW8bit):
    """Steps float32 masters on `device`; divides gradients by `grad_scale` as torch's fused AdamW does."""

    grad_scale: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], device: torch.device) -> None:
        super().__init__(groups, min_8bit_size=SMALLEST)
        self.initialized = True  # else the first step would take all moments to the device
        # The signed table ends at 1 and -0.993. With -1 a block's largest magnitude is always one of its
        # values, and the values alone give back their block.
        self.name2qmap["dynamic"][0] = -1.0
        self.name2qmap = {name: table.to(device) for name, table in self.name2qmap.items()}

    def new_state(self, master: Tensor, zeros: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Of no step yet; `zeros` makes tensors like the one given."""
        state: dict[str, Any] = {"step": 0}
        for i, _, table in MOMENTS:
            if master.numel() < SMALLEST:
                state[f"state{i}"] = zeros(master)
                continue
            codes = torch.empty_like(master, dtype=torch.uint8, device="meta")
            scales = torch.empty(-(-master.numel() // BLOCK), device="meta")
            state |= {
                f"state{i}": zeros(codes),
                f"absmax{i}": zeros(scales),
                f"qmap{i}": self.name2qmap[table],
            }
        return state

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        if self.grad_scale is not None and p.grad is not None:
            p.grad.div_(self.grad_scale)
        if p.numel():
            super().update_step(group, p, gindex, pindex)
        else:  # other ranks have all rows, and no kernel takes none
            self.state[p]["step"] += 1

    def values(self, master: Tensor) -> dict[str, Tensor]:
        """As torch's AdamW has them, those of 8 bits in the host's memory; empty before the first step."""
        if not (state := self.state.get(master)):
            return {}
        values = {"step": torch.tensor(float(state["step"]))}
        for i, name, _ in MOMENTS:
            values[name] = moment = state[f"state{i}"]
            if (scales := state.get(f"absmax{i}")) is not None:
                table = state[f"qmap{i}"].to(moment.device)
                values[name] = dequantize_blockwise(moment, absmax=scales, code=table, blocksize=BLOCK).cpu()
        return values

    def take(self, master: Tensor, values: Mapping[str, Tensor]) -> None:
        """The reverse of `values`: exact for what that gave, the nearest 8 bits for any other."""
        state = self.state[master]
        state["step"] = int(values["step"])
        for i, name, _ in MOMENTS:
            moment = state[f"state{i}"]
            found = values[name].to(moment.device)
            if (scales := state.get(f"absmax{i}")) is not None:
                table = state[f"qmap{i}"].to(moment.device)
                blocks = F.pad(found.flatten(), (0, -found.numel() % BLOCK)).view(-1, BLOCK)
                scales.copy_(blocks.abs().amax(1))
                scaled = blocks / scales.where(scales > 0, 1.0)[:, None]
                nearest = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)
                found = nearest.flatten()[: found.numel()].view_as(moment)
            moment.copy_(found)
