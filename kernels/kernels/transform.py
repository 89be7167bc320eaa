"""From dot products to logits, once for every kernel of the head.

The logit that enters the softmax is

    z = softcap · tanh((x·w + bias) · logit_scale / softcap) · inv_temperature

with the tanh left out when there is no softcap. The kernels hold x·w in float32 registers and call these
helpers; which parts exist is decided at compile time, so the plain case is the identity and costs nothing.

Conventions shared by the kernels:

- rows are tokens, columns are vocabulary entries, `inv_temperature` is one float32 per row and only read when
  `HAS_SCALE` (a temperature or a logit scale other than one is in force);
- a *mass tile* is `TILE` columns of one row. The forward stores `tile_lse`, (ceil(V / TILE), N) float32: the
  log-sum-exp of each row's logits over each tile, -inf where every logit of the tile is -inf;
- a target below zero marks a row without work, a target of V or more a row whose target is not in
  this weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem

LOG2E = tl.constexpr(1.4426950408889634)


def transform_arguments(problem: HeadProblem) -> dict[str, object]:
    """The way from a product to a logit, by the kernels' names."""
    inv_temperature = problem.inv_temperature
    has_scale = inv_temperature is not None or problem.logit_scale != 1.0
    if has_scale and inv_temperature is None:
        inv_temperature = problem.hidden.new_ones(problem.hidden.shape[0], dtype=torch.float32)
    return {
        "bias": problem.bias,
        "inv_temperature": inv_temperature,
        "logit_scale": float(problem.logit_scale),
        "softcap": float(problem.softcap or 0.0),
        "HAS_BIAS": problem.bias is not None,
        "HAS_SOFTCAP": problem.softcap is not None,
        "HAS_SCALE": has_scale,
    }


@triton.jit
def transform_logits(
    products,  # (ROWS, COLUMNS) float32: x·w
    bias,  # (COLUMNS,) float32, read when HAS_BIAS
    inv_temperature,  # (ROWS,) float32, read when HAS_SCALE
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """z of every product, (ROWS, COLUMNS) float32."""
    if HAS_BIAS:
        products += bias[None, :]
    if HAS_SOFTCAP:
        products = softcap * _tanh(products * (logit_scale / softcap))
        if HAS_SCALE:
            products *= inv_temperature[:, None]
    elif HAS_SCALE:
        products *= (inv_temperature * logit_scale)[:, None]
    return products


@triton.jit
def untransform_gradient(
    gradient,  # (ROWS, COLUMNS) float32: dL/dz
    logits,  # (ROWS, COLUMNS) float32: z
    inv_temperature,  # (ROWS,) float32, read when HAS_SCALE
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """dL/d(x·w + bias) from dL/dz: multiplied by dz/d(x·w), which is read off z itself."""
    if HAS_SOFTCAP:
        saturation = logits / softcap
        if HAS_SCALE:
            saturation /= inv_temperature[:, None]
        gradient *= 1.0 - saturation * saturation
    if HAS_SCALE:
        gradient *= (inv_temperature * logit_scale)[:, None]
    return gradient


@triton.jit
def _tanh(x):
    """Saturates without overflow: exp(2x) may be zero or infinite."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
