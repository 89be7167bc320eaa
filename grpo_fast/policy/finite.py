"""Whether numbers are still numbers: what a run that diverged leaves is neither trained on nor saved."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from torch.nn.utils import get_total_norm


class Diverged(FloatingPointError):
    """Gradients or weights hold NaN or infinity."""


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that holds NaN or infinity, if there is one.

    Waits for the device once where all are finite. Tensors may be of any dtype, shape and device.
    """
    floats = {name: t.detach() for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if math.isfinite(get_total_norm(floats.values(), norm_type=math.inf)):
        return None
    return next(name for name, tensor in floats.items() if not tensor.isfinite().all())
