"""What adapters do with a host library: replace its attributes, stand in for its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_fast.head import HeadParameters, linear_logprob
from grpo_fast.head.parameters import head_parameters

_ABSENT = object()


class Replacements(ExitStack):
    """Attributes of modules, classes and instances that were replaced, until it is closed."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Closing gives the owner its own object back; what it inherited, it inherits again."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)


def logprob_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Both of `linear_logprob`, which the options are for; what most hosts' fused heads return."""
    out = linear_logprob(hidden, weight, targets, outputs=("logprob", "entropy"), **options)
    assert out.entropy is not None
    return out.logprob, out.entropy


@contextmanager
def tapped_head(model: Any, function: Callable[[Tensor, HeadParameters], Any]) -> Iterator[list[Any]]:
    """While open, `model` computes `function(hidden, head)` in place of its logits.

    The head module is still called, once and where the model calls it, so what hooks on its call (FSDP and
    ZeRO-3 gather its weight there, and again for the backward) works as before. The model receives logits
    of width zero, which it may scale, cap or slice but not read.

    Args:
        model: a transformers causal language model, not wrapped.
        function: given the hidden states (B, T, H) that the head receives and the head's parameters, returns
            tensors, or a tuple or dict of them.

    Yields:
        What the function returned, one entry for each call of the head.

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
        # The last of the hooks: those that were there before it see the result.
        replacements.callback(head.register_forward_hook(keep).remove)
        yield results
