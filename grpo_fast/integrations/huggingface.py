"""Compute the loss of any transformers causal language model without its logits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from grpo_fast.head import HeadParameters, linear_cross_entropy
from grpo_fast.head.checks import compute_dtype
from grpo_fast.head.parameters import head_parameters
from grpo_fast.integrations.host import Replacements, tapped_head

_UNDO = "_grpo_fast_undo"  # attribute of a patched model


def patch_causal_lm(model: nn.Module, *, tolerance: float | None = None) -> nn.Module:
    """Make `model(input_ids, labels=...)` compute its loss by `linear_cross_entropy`.

    The loss is the one of transformers: labels are shifted unless `shift_labels` is given, `ignore_index`
    (−100) is left out, and the sum is divided by `num_items_in_batch`, or else by the number of targets.
    Softcap and logit scale are the configuration's, auxiliary losses are added as before, and
    `output.logits` is None. In evaluation mode without gradients the logits are formed when they are first
    read, which `Trainer` does only for `compute_metrics`. Reading them after the weight has changed, or after
    FSDP or ZeRO-3 has freed it, is an error. Calls without labels and compiled evaluations are unchanged.
    Patch before wrapping (DDP, FSDP, Trainer, Accelerate's `prepare`), and unpatch before copying the model.

    Args:
        model: a transformers causal language model, or PEFT's wrapper of one with the head left plain.
        tolerance: of `linear_logprob`.

    Returns:
        The same model.

    Raises:
        TypeError: the model is not a transformers model.
        ValueError: it has no plain linear head, is patched already, or does not compute its loss by
            transformers' common function.
    """
    base = _base(model)
    if _UNDO in vars(base):
        raise ValueError(f"this {type(base).__name__} is patched already; call unpatch_causal_lm first")
    head_parameters(base)
    original = base.forward
    signature = inspect.signature(original)
    if "labels" not in signature.parameters:
        raise ValueError(f"{type(base).__name__}.forward has no labels; give a causal language model")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind(*args, **kwargs).arguments, **kwargs}
        patched = vars(base).get(_UNDO) is undo
        no_loss = given.get("labels") is None and given.get("shift_labels") is None
        evaluates = not (base.training or torch.is_grad_enabled())
        if not patched or no_loss or (evaluates and torch.compiler.is_compiling()):
            return original(*args, **kwargs)
        taken: list[Tensor] = []
        logits: Tensor | None = None

        def compute(hidden: Tensor, head: HeadParameters) -> Tensor:
            nonlocal logits
            if evaluates:
                logits = _Logits.of(hidden, head)
            return _causal_lm_loss(hidden, head, given, tolerance)

        def loss_of_tap(*_args: Any, **_kwargs: Any) -> Tensor:
            taken.extend(losses)
            return losses[0]

        with tapped_head(base, compute) as losses, Replacements() as replacements:
            replacements.replace(base, "_loss_function", loss_of_tap)
            output = original(*args, **kwargs)
        if not taken:
            raise ValueError(
                f"{type(base).__name__} does not compute its loss by transformers' loss_function; unpatch it"
            )
        if isinstance(output, tuple):  # return_dict=False: losses, then logits, ...
            place = next(i for i, one in enumerate(output) if one.dim() and one.shape[-1] == 0)
            return (*output[:place], *(() if logits is None else (logits,)), *output[place + 1 :])
        # A ModelOutput drops None only in its constructor.
        return type(output)(**{**output, "logits": logits})

    replacements = Replacements()
    replacements.replace(base, "forward", forward)

    def undo() -> None:
        # A wrapper around the patched forward stays, together with what it wraps.
        if vars(base).get("forward") is forward:
            replacements.close()

    setattr(base, _UNDO, undo)
    return model


def unpatch_causal_lm(model: nn.Module) -> nn.Module:
    """Undo `patch_causal_lm`. A wrapper that was later put around the patched forward stays.

    Raises:
        ValueError: the model is not patched.
    """
    base = _base(model)
    undo = vars(base).pop(_UNDO, None)
    if undo is None:
        raise ValueError(f"this {type(base).__name__} is not patched")
    undo()
    return model


class _Logits(Tensor):
    """Logits that are computed when more than their shape, dtype or device is read."""

    _compute: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> _Logits:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        made._compute = functools.cache(compute)
        return made

    @classmethod
    @torch.compiler.disable
    def of(cls, hidden: Tensor, head: HeadParameters) -> _Logits:
        kind, size = compute_dtype(hidden, head.weight), head.weight.nbytes
        version = None if head.weight.is_inference() else head.weight._version

        @torch.no_grad()
        def compute() -> Tensor:
            freed = head.weight.untyped_storage().nbytes() < size
            if freed or (version is not None and head.weight._version != version):
                raise RuntimeError(
                    f"the output head's weight was {'freed' if freed else 'changed'} before logits were read "
                    "that need it: read them earlier, or call unpatch_causal_lm for the evaluation"
                )
            return head.logits(hidden, kind)

        return cls(compute, (*hidden.shape[:-1], len(head.weight)), kind, hidden.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN_UNFORMED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.float:  # what accelerate does to each output under mixed precision
            (one,) = args
            with torch._C.DisableTorchFunctionSubclass():
                return cls(lambda: one._compute().float(), one.shape, torch.float32, one.device)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda one: one._compute(), (args, kwargs or {}))
        return func(*args, **kwargs)


_KNOWN_UNFORMED = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "grad_fn")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point),
}  # fmt: skip


def _causal_lm_loss(
    hidden: Tensor, head: HeadParameters, given: dict[str, Any], tolerance: float | None
) -> Tensor:
    """Compute `ForCausalLMLoss` from hidden states (B, T, H) and the arguments of the model's forward.

    Only rows with a target reach the head. Without any, and without `num_items_in_batch`, the loss is NaN.
    """
    ignore_index = given.get("ignore_index", -100)
    targets = given.get("shift_labels")
    if targets is None:
        targets = nn.functional.pad(given["labels"], (0, 1), value=ignore_index)[..., 1:]
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(targets.shape)}, the hidden states {tuple(hidden.shape)}: leave "
            "logits_to_keep out where labels are given"
        )
    targets = targets.reshape(-1).to(hidden.device)
    live = (targets != ignore_index).nonzero().squeeze(1)
    total = linear_cross_entropy(
        hidden.flatten(0, -2).index_select(0, live),
        head.weight,
        targets.index_select(0, live),
        reduction="sum",
        ignore_index=ignore_index,
        **replace(head, tolerance=tolerance).options,
    )
    items = given.get("num_items_in_batch")
    items = live.numel() if items is None else items
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def _base(model: Any) -> PreTrainedModel:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers model, got {type(model).__name__}; patch it before it is wrapped"
        )
    return base
