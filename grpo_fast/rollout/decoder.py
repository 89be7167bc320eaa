"""Prompts read once, then one token a row and step: ways of decoding that leave attention to the model.

`ExpandedDecoder` repeats each prompt's cache, whatever the model keeps in it, for its completions.
`EvenDecoder` does so for models that padding confuses. `RecomputedDecoder` keeps nothing and serves what has
no cache, or one that is wrong. `SharedPrefixDecoder`, in a file of its own, copies no prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import expm1, inf, log
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from grpo_fast.policy.architecture import whole_rows
from grpo_fast.rollout.images import ImagePrompts

if TYPE_CHECKING:
    from grpo_fast.plan.model_shape import ModelShape

Prompt = Sequence[int]

CACHES = ("cache", "past_key_values", "cache_params", "state")  # how models call what they take and give back
_OF_CACHES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)  # objects that hold tensors


class InFlight(NamedTuple):
    """What is decoded at once."""

    prompts: int
    longest: int  # tokens of a prompt
    rows: int  # completions
    max_new: int  # tokens of the longest completion


class ExpandedDecoder:
    """R rows in flight, each continuing one of U prompts: the model's own attention, one cache entry a row.

    Args:
        max_new: tokens of the longest completion.

    Attributes:
        attention: transformers' name of the implementation that the model must be set to.
    """

    cost: ClassVar[str] = "each completion has a copy of its prompt's keys and values"
    pads: ClassVar[bool] = True
    """Prompts of different lengths can be read together."""

    def __init__(self, model: PreTrainedModel, max_new: int) -> None:
        self.model, self.max_new = model, max_new
        self.attention: str = model.config._attn_implementation  # as it is trained
        self.cache: Any = None
        self._cache_name = ""
        self.images: ImagePrompts | None = None  # of prompts with negative tokens
        self.mask: Tensor | None = None  # (R, tokens) bool; None: nothing is padded
        options = inspect.signature(model.forward).parameters
        self._takes = (
            None if any(option.kind == option.VAR_KEYWORD for option in options.values()) else options
        )

    @classmethod
    def supports(cls, model: PreTrainedModel) -> bool:
        """Whether it is worth a trial with this model."""
        return True

    @staticmethod
    def kv_tokens(held: InFlight) -> int:
        """Tokens whose keys and values are held at once."""
        return held.rows * (held.longest + held.max_new)

    @classmethod
    def kv_bytes(cls, shape: ModelShape, held: InFlight, *, on_cpu: bool) -> int:
        """Bytes of keys, values and states at the end of the longest completion."""
        return held.rows * shape.kv_bytes(held.longest + held.max_new)

    @classmethod
    def held_once(cls, prompts: Sequence[Prompt]) -> int:
        """Tokens that all prompts begin with, and whose keys and values are not held for each."""
        return 0

    def prefill(self, prompts: Sequence[Prompt], owners: Tensor) -> Tensor:
        """Read U prompts. `owners` (R,) int64, ascending, is the prompt of each row. (R, V) logits."""
        logits = self.read(prompts, 0)
        if len(owners) > len(prompts):
            self.keep(owners)
        return logits[owners]

    def read(self, prompts: Sequence[Prompt], common: int) -> Tensor:
        """(U, V) logits. The cache is laid out as [the common beginning | padding | rest]."""
        device = self.model.device
        if common:
            ids = torch.tensor([list(prompts[0][:common])], device=device)
            self.last_logits(ids, torch.arange(common, device=device)[None])
            self.select(torch.zeros(len(prompts), dtype=torch.int64, device=device), 1)
        longest = max(map(len, prompts)) - common
        pads = [common + longest - len(prompt) for prompt in prompts]
        rest = [[0] * pad + list(prompt[common:]) for pad, prompt in zip(pads, prompts, strict=True)]
        real = (torch.arange(longest) >= torch.tensor(pads)[:, None]).to(device)
        positions = common + (real.cumsum(-1) - 1).clamp(min=0)  # a pad's position is never looked at
        self.positions = positions[:, -1:]
        if any(pads):
            self.mask = torch.cat([real.new_ones(len(prompts), common), real], 1)
        ids = torch.tensor(rest, device=device)
        if self.images is not None and int(ids.min()) < 0:
            logits, self.positions, self.cache = self.images.read(
                ids, positions, self.cache, self.mask, common
            )
            self._cache_name = "past_key_values"
            return logits
        return self.last_logits(ids, positions)

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` (R,) int64. (R, V) logits of the next ones."""
        self.positions = self.positions + 1
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        return self.last_logits(tokens[:, None], self.positions)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only: ascending indices, int64, into the present ones."""
        self.select(rows, len(self.positions))
        self.positions = self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]

    def select(self, rows: Tensor, held: int) -> None:
        """The cache of these of the `held` rows."""
        self.cache = selected(self.cache, rows, held)

    def last_logits(self, ids: Tensor, positions: Tensor, **options: Any) -> Tensor:
        """(B, V) of the last column of `ids` (B, t), which joins the cache.

        The first forward has none: a model makes the kind that it needs.
        """
        # As a number, `logits_to_keep` would make the model slice its hidden states; the product with the
        # head then repeats the whole head for every row (torch.matmul does not fold a strided batch). An
        # index copies the rows instead.
        options |= {"logits_to_keep": torch.tensor([ids.shape[1] - 1], device=ids.device)}
        options |= {"position_ids": positions, "use_cache": True}
        if self.mask is not None and self._cache_name not in ("cache_params", "state"):
            options["attention_mask"] = self.mask  # of states none is needed, once they are there
        if self._takes is not None:
            options = {name: value for name, value in options.items() if name in self._takes}
        if self.cache is not None:
            options[self._cache_name] = self.cache
        output = self.model(input_ids=ids, **options)
        for name in CACHES:
            if getattr(output, name, None) is not None:
                self._cache_name, self.cache = name, getattr(output, name)
                return output.logits[:, -1]
        raise NotImplementedError(f"{type(self.model).__name__} gives no cache back")


class EvenDecoder(ExpandedDecoder):
    """For models that would take padding for tokens, such as those that know no mask."""

    cost = "prompts are decoded together only where they are of one length"
    pads = False


class RecomputedDecoder(ExpandedDecoder):
    """For models without a cache that can be forked: every token is a forward of whole rows."""

    cost = "each token costs its whole sequence again, which is slow"

    @classmethod
    def kv_bytes(cls, shape: ModelShape, held: InFlight, *, on_cpu: bool) -> int:
        return 0

    def prefill(self, prompts: Sequence[Prompt], owners: Tensor) -> Tensor:
        device = self.model.device
        self.ids = pad_sequence([torch.tensor(prompt, device=device) for prompt in prompts], batch_first=True)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        logits = self._logits()
        self.keep(owners)
        return logits[owners]

    def step(self, tokens: Tensor) -> Tensor:
        if int(self.lengths.max()) == self.ids.shape[1]:
            self.ids = nn.functional.pad(self.ids, (0, 1))
        self.ids[torch.arange(len(tokens), device=tokens.device), self.lengths] = tokens
        self.lengths = self.lengths + 1
        return self._logits()

    def keep(self, rows: Tensor) -> None:
        self.ids, self.lengths = self.ids[rows], self.lengths[rows]

    def _logits(self) -> Tensor:
        """(R, V) of each row's last token. What is behind it a causal model does not see."""
        rows, last = torch.arange(len(self.ids), device=self.ids.device), self.lengths - 1
        head: Any = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, given: (given[0][rows, last][:, None], *given[1:]))
        try:
            output: Any = self.model(**whole_rows(self.model, self.ids))
        finally:
            hook.remove()
        return output.logits[:, -1]


@contextmanager
def bounded_steps(model: nn.Module) -> Iterator[None]:
    """Layers of Mamba 2 keep their time step within its limits token by token, too, as Nemotron-H's and
    Zamba 2's do in a forward of a sequence: transformers leaves the limits out of its decoding."""
    modules: Iterable[Any] = model.modules()
    limited = [m for m in modules if getattr(m, "time_step_limit", (0, inf)) != (0, inf)]
    hooks = [mixer.in_proj.register_forward_hook(partial(_bound_step, mixer)) for mixer in limited]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _bound_step(mixer: Any, _: nn.Module, __: object, projected: Tensor) -> Tensor:
    """(B, T, D), whose last columns are what the time step is the softplus of, but for its bias."""
    # softplus(x) = y where x = y + log(1 - exp(-y))
    low, high = (y + log(-expm1(-y)) if y else -inf for y in mixer.time_step_limit)
    bias, heads = mixer.dt_bias, len(mixer.dt_bias)
    rest, step = projected.split([projected.shape[-1] - heads, heads], -1)
    return torch.cat([rest, step.float().clamp(low - bias, high - bias).to(step.dtype)], -1)


def changed(held: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`held`, with `change` of each tensor of rows that it is or has; caches and layers change in place."""
    if isinstance(held, Tensor):
        return change(held) if held.dim() > 1 else held  # else a counter, or a layer without tokens yet
    if isinstance(held, list | tuple):
        return type(held)(changed(part, change) for part in held)
    if isinstance(held, dict):
        return {name: changed(part, change) for name, part in held.items()}
    if isinstance(held, _OF_CACHES) or type(held).__name__.endswith("Cache"):
        vars(held).update(changed(vars(held), change))
    return held


def selected(held: Any, rows: Tensor, count: int) -> Any:
    """A cache, or a part of one, of `count` rows, with these of the rows: `changed`.

    Caches of transformers agree on no method for it: some select by `reorder_cache`, some by
    `batch_select_indices`, some not all they hold, and some are lists.

    Raises:
        NotImplementedError: a tensor has other rows.
    """

    def select(tensor: Tensor) -> Tensor:
        axis = 0 if tensor.is_floating_point() else tensor.dim() - 2  # positions may be of planes: (3, B, T)
        if tensor.shape[axis] != count:
            raise NotImplementedError(f"its cache holds {tuple(tensor.shape)} for {count} rows")
        return tensor.index_select(axis, rows)

    return changed(held, select)
