"""Any causal language model of transformers: its loss without its logits. For Trainer, Accelerate, a loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.head import HeadParameters, linear_cross_entropy
from grpo_fast.integrations.head_tap import tapped_head
from grpo_fast.policy.architecture import head_parameters

_MARK = "_grpo_fast_patch"


@dataclass(frozen=True)
class _Patch:
    forward: Callable[..., Any]
    before: Callable[..., Any] | None  # the instance's own forward that it covers; None: the class's


def patch_causal_lm(model: nn.Module, *, logits: bool = False, tolerance: float | None = None) -> nn.Module:
    """Make `model(input_ids, labels=...)` compute its loss by `linear_cross_entropy`.

    The loss is transformers' own: labels are shifted unless `shift_labels` is given, `ignore_index` (−100) is
    left out, and the sum is divided by `num_items_in_batch` where that is given, else by the number of
    targets. Softcap and logit scale are the configuration's; auxiliary losses are added as before. A call
    without labels is untouched. Patch before wrapping (DDP, FSDP, Accelerate's `prepare`, Trainer), and
    unpatch before copying the model.

    Args:
        model: a transformers causal language model, or PEFT's wrapper of one with the head left plain.
        logits: also return the logits, without gradient, for metrics; otherwise `output.logits` is None.
        tolerance: of `linear_logprob`.

    Returns:
        The same model.

    Raises:
        TypeError: the model is not one of transformers'.
        ValueError: it has no plain linear head, is patched already, or its loss is not transformers' common
            one.
    """
    base = _base(model)
    if _MARK in vars(base):
        raise ValueError(f"this {type(base).__name__} is patched already; call unpatch_causal_lm first")
    head_parameters(base)
    original = base.forward
    signature = inspect.signature(original)
    if "labels" not in signature.parameters:
        raise ValueError(f"{type(base).__name__}.forward has no labels; give a causal language model")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind(*args, **kwargs).arguments, **kwargs}
        patched = vars(base).get(_MARK) is patch
        if not patched or (given.get("labels") is None and given.get("shift_labels") is None):
            return original(*args, **kwargs)
        return _forward_without_logits(base, original, args, kwargs, given, logits, tolerance)

    patch = _Patch(forward, vars(base).get("forward"))
    setattr(base, _MARK, patch)
    base.forward = forward
    return model


def unpatch_causal_lm(model: nn.Module) -> nn.Module:
    """Undo `patch_causal_lm`. A wrapper that was put around the patched forward since then stays.

    Raises:
        ValueError: the model is not patched.
    """
    base = _base(model)
    patch = vars(base).pop(_MARK, None)
    if patch is None:
        raise ValueError(f"this {type(base).__name__} is not patched")
    if vars(base).get("forward") is patch.forward:
        del base.forward
        if patch.before is not None:
            base.forward = patch.before
    return model


def causal_lm_loss(
    hidden: Tensor,
    head: HeadParameters,
    labels: Tensor | None,
    *,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    tolerance: float | None = None,
) -> Tensor:
    """transformers' `ForCausalLMLoss`, from hidden states (B, T, H).

    Only rows that have a target reach the head.

    Returns:
        () float32, float64 for float64 inputs. NaN where nothing is to be predicted and no
        `num_items_in_batch` is given, as torch's mean of nothing.

    Raises:
        ValueError: labels and hidden states of different shapes.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if shift_labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(shift_labels.shape)}, the hidden states {tuple(hidden.shape)}: leave "
            "logits_to_keep out where labels are given"
        )
    targets = shift_labels.reshape(-1).to(hidden.device)
    live = (targets != ignore_index).nonzero().squeeze(1)
    total = linear_cross_entropy(
        hidden.flatten(0, -2).index_select(0, live),
        head.weight,
        targets.index_select(0, live),
        reduction="sum",
        ignore_index=ignore_index,
        tolerance=tolerance,
        **head.options,
    )
    if num_items_in_batch is None:
        return total / live.numel() if live.numel() else total * torch.nan
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def _forward_without_logits(
    model: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: dict[str, Any],
    logits: bool,
    tolerance: float | None,
) -> Any:
    options = {
        name: given[name]
        for name in ("shift_labels", "num_items_in_batch", "ignore_index")
        if given.get(name) is not None
    }

    def compute(hidden: Tensor, head: HeadParameters) -> dict[str, Tensor]:
        result = {"loss": causal_lm_loss(hidden, head, given.get("labels"), tolerance=tolerance, **options)}
        if logits:
            result["logits"] = (
                head.logits(hidden.detach().flatten(0, -2)).detach().view(*hidden.shape[:-1], -1)
            )
        return result

    with (
        tapped_head(model, compute) as tap,
        _loss_function(model, lambda **_: tap.result["loss"]) as loss_called,
    ):
        output = original(*args, **kwargs)
    if not (tap.called and loss_called):
        raise ValueError(
            f"{type(model).__name__} does not compute its loss by transformers' loss_function; unpatch it"
        )
    return _with_logits(output, tap.result.get("logits"))


@contextmanager
def _loss_function(model: nn.Module, replacement: Callable[..., Tensor]) -> Iterator[list[bool]]:
    """While open, the model's loss is what `replacement` returns; the list fills when it was asked for."""
    own, called = vars(model).get("_loss_function"), []

    def loss(*_args: Any, **_kwargs: Any) -> Tensor:
        called.append(True)
        return replacement()

    model._loss_function = loss
    try:
        yield called
    finally:
        if own is None:
            del model._loss_function
        else:
            model._loss_function = own


def _with_logits(output: Any, logits: Tensor | None) -> Any:
    if isinstance(output, tuple):  # return_dict=False: loss, logits, ...
        rest = output[2:]
        return (output[0], *rest) if logits is None else (output[0], logits, *rest)
    # An output drops what is None only when it is made.
    return type(output)(**{**output, "logits": logits})


def _base(model: nn.Module) -> nn.Module:
    from transformers import PreTrainedModel

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers model, got {type(model).__name__}; patch it before it is wrapped"
        )
    return base
