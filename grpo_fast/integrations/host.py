"""Replace attributes of a host library, and its logits by scores of single tokens."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_fast.head import HeadParameters, linear_logprob
from grpo_fast.head.parameters import head_parameters

_ABSENT = object()


class Replacements(ExitStack):
    """Replaced attributes of modules, classes and instances; closing restores them."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute until this is closed; then an inherited one is inherited again."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)


def rebind(hosts: str | tuple[str, ...], old: Any, new: Any) -> None:
    """Replace `old` under every name, in each loaded module whose name starts with one of `hosts`."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(hosts) and isinstance(module, ModuleType):
            for name in [name for name, value in list(vars(module).items()) if value is old]:
                setattr(module, name, new)


def logprob_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return both results of `linear_logprob`, which takes the options."""
    out = linear_logprob(hidden, weight, targets, outputs=("logprob", "entropy"), **options)
    assert out.entropy is not None
    return out.logprob, out.entropy


@contextmanager
def tapped_head(model: Any, function: Callable[[Tensor, HeadParameters], Any]) -> Iterator[list[Any]]:
    """Make `model` compute `function(hidden, head)` in place of its logits while open.

    The head module is still called once, so hooks on its call work as before: FSDP and ZeRO-3 gather its
    weight there, and again for the backward. The model receives logits of width zero, which it may scale,
    cap or slice but not read.

    Args:
        model: a transformers causal language model, not wrapped.
        function: takes the head's input (B, T, H) and its parameters, and returns tensors, or a tuple or
            dict of them.

    Yields:
        The results of the function, one for each call of the head.

    Raises:
        ValueError: the model has no plain linear head.
    """
    head_parameters(model)
    head = model.get_output_embeddings()
    results: list[Any] = []

    def compute(hidden: Tensor) -> Any:
        parameters = head_parameters(model)
        if isinstance(parameters.weight, DTensor):
            raise ValueError(
                "the output head's weight is a DTensor while its forward runs: exclude the head from tensor "
                "parallelism"
            )
        return function(hidden, parameters)

    def keep(_: nn.Module, inputs: tuple[Tensor, ...], result: Any) -> Tensor:
        results.append(result)
        return inputs[0].detach().new_empty(*inputs[0].shape[:-1], 0)

    with Replacements() as replacements:
        replacements.replace(head, "forward", compute)
        # Registered last, so that earlier hooks see the result.
        replacements.callback(head.register_forward_hook(keep).remove)
        yield results


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside DeepSpeed's engine, DDP and PEFT's wrapper."""
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def scores_for_logits(
    model: Any,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_grad: bool = False,
    targets: Callable[[], Tensor | None] = lambda: None,
) -> Iterator[None]:
    """Make `model` return scores of the next input token in place of logits while open.

    The logits of the output are (B, T, 1), or (B, T, 2) with the entropy: `temperature` times the
    log-probability and the entropy, in float32. The host divides these by the temperature, shifts, slices or
    packs them as it does logits. `logprob_of` and `entropy_of` replace its functions of logits.

    Args:
        model: a transformers causal language model, possibly wrapped.
        entropy_grad: let gradients flow into the entropy.
        targets: called in the forward, returns the target token (B, T) of each input position. None: the next
            input token; the last position of a row then predicts the first token.

    Raises:
        ValueError: as `tapped_head` does.
    """
    model, given = unwrapped(model), {}

    def keep_inputs(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        given["ids"] = options["input_ids"] if "input_ids" in options else inputs[0]

    def score(hidden: Tensor, head: HeadParameters) -> Tensor:
        labels = targets()
        labels = torch.roll(given["ids"], -1, dims=-1) if labels is None else labels
        options = {"temperature": temperature, **head.options}
        outputs = ("logprob", "entropy") if entropy else ("logprob",)
        labels = labels[:, -hidden.shape[1] :]  # the head may get the last positions only
        out = linear_logprob(hidden, head.weight, labels, outputs=outputs, **options)
        scores = [out.logprob]
        if out.entropy is not None:
            scores.append(out.entropy if entropy_grad else out.entropy.detach())
        return torch.stack(scores, dim=-1) * temperature

    def show(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        output["logits"] = results.pop()
        return output

    with tapped_head(model, score) as results, ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(keep_inputs, with_kwargs=True).remove)
        hooks.callback(model.register_forward_hook(show).remove)
        yield


def logprob_of(
    scores: Tensor, targets: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None, **_: Any
) -> Tensor:
    """Replace a host's `selective_log_softmax` on what `scores_for_logits` returns.

    Args:
        scores: (..., T', 1 or 2), T' at least T.
        targets: (..., T), read for its shape only.
        temperature: by which the scores are not divided yet.
        row_mask: (..., T), 0 where the result is 0.
    """
    logprobs = scores[..., : targets.shape[-1], 0] / temperature
    return logprobs if row_mask is None else logprobs.masked_fill(row_mask == 0, 0.0)


def entropy_of(scores: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replace a host's `entropy_from_logits` on what `scores_for_logits` returns with the entropy."""
    return scores[..., 1]


def _logprob_and_entropy_of(
    scores: Tensor, targets: Tensor, entropy_requires_grad: bool = True, **options: Any
) -> tuple[Tensor, Tensor]:
    return logprob_of(scores, targets, **options), logprob_of(scores.flip(-1), targets, **options)


# The functions of logits in TRL and in trainers that derive from it.
_ON_SCORES = {
    "selective_log_softmax": logprob_of,
    "_fused_selective_log_softmax": logprob_of,
    "selective_log_softmax_and_entropy": _logprob_and_entropy_of,
    "entropy_from_logits": entropy_of,
}


def score_in_method(patch: Replacements, trainer: type, name: str) -> None:
    """Run the method `name(self, model, ...)` of a trainer derived from TRL's on scores.

    The method calls the model and passes the logits to functions in `_ON_SCORES`, which its module imports.
    """
    original = getattr(trainer, name)
    signature, module = inspect.signature(original), sys.modules[inspect.unwrap(original).__module__]

    @functools.wraps(original)
    def method(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, model, *args, **kwargs)
        bound.apply_defaults()
        scores = scores_for_logits(
            model,
            self.temperature,
            entropy=bound.arguments.get("compute_entropy", False),
            entropy_grad=getattr(self, "_entropy_bonus_enabled", False),
        )
        with scores, Replacements() as replacements:
            for function in _ON_SCORES.keys() & vars(module).keys():
                replacements.replace(module, function, _ON_SCORES[function])
            return original(self, model, *args, **kwargs)

    patch.replace(trainer, name, method)
