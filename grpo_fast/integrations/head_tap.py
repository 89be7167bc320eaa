"""Per-token results in place of logits, inside a transformers model and elsewhere.

`tapped_head` stands between a model and its output head: results leave, logits never form. The head module is
still called, once and where the model calls it, so whatever hooks on its call (FSDP and ZeRO-3 gather its
weight there, and again for the backward) works as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_fast.head import HeadParameters, linear_logprob
from grpo_fast.integrations.host import Replacements
from grpo_fast.policy.architecture import head_parameters

HeadFunction = Callable[[Tensor, HeadParameters], Any]


def logprob_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Both of `linear_logprob`, which the options are for; what most hosts' fused heads return."""
    out = linear_logprob(hidden, weight, targets, outputs=("logprob", "entropy"), **options)
    assert out.entropy is not None
    return out.logprob, out.entropy


class HeadTap(nn.Module):
    """Takes the head's place for one forward, and keeps what `function` made of the hidden states.

    The model receives logits of width zero, which it may scale, cap or slice but not read.
    """

    def __init__(self, head: nn.Linear, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        # In a tuple, or the head's parameters would be listed twice.
        self._head = (head,)
        self._function = function
        self.called = False
        self.result: Any = None

    @property
    def weight(self) -> Tensor:
        """(V, H), for models that ask their head for its dtype or device."""
        return self._head[0].weight

    def forward(self, hidden: Tensor) -> Tensor:
        with Replacements() as replacements:
            replacements.replace(self._head[0], "forward", self._function)
            self.result = self._head[0](hidden)
        self.called = True
        return hidden.detach().new_empty(*hidden.shape[:-1], 0)


@contextmanager
def tapped_head(model: Any, function: HeadFunction) -> Iterator[HeadTap]:
    """While open, `model` computes `function(hidden, head)` in place of its logits.

    Args:
        model: a transformers causal language model, not wrapped.
        function: given the hidden states (B, T, H) that the head receives and the head's parameters, returns
            tensors, or a tuple or dict of them.

    Raises:
        ValueError: the model has no plain linear head.
    """
    head = model.get_output_embeddings()
    head_parameters(model)
    owner, name = _place(model, head)

    def compute(hidden: Tensor) -> Any:
        parameters = head_parameters(model)
        if isinstance(parameters.weight, DTensor):
            raise ValueError(
                "the output head's weight is a DTensor while its forward runs: exclude the head from tensor "
                "parallelism"
            )
        return function(hidden, parameters)

    tap = HeadTap(head, compute)
    with Replacements() as replacements:
        # head_parameters reads the head through the model, which must go on finding the real one.
        replacements.replace(model, "get_output_embeddings", lambda: head)
        owner._modules[name] = tap
        try:
            yield tap
        finally:
            owner._modules[name] = head


def _place(model: nn.Module, head: nn.Module) -> tuple[nn.Module, str]:
    for owner in model.modules():
        for name, child in owner._modules.items():
            if child is head:
                return owner, name
    raise ValueError(f"{type(model).__name__} names an output head that is not one of its modules")
