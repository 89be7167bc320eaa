"""Check a model's layers and head, by its configuration and by short forwards."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from grpo_fast.data.table import CompletionTable
from grpo_fast.policy.layers import decoder_layers, wrap_forward
from grpo_fast.policy.layout import PackedLayout
from grpo_fast.policy.packing import pack
from grpo_fast.policy.vision import auto_class, model_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from grpo_fast.policy.policy import Policy

_ATTENTION = ("full_attention", "sliding_attention")
_RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")  # with a state, see `recurrent`
_KEEPS_STATES = Version("5.17")  # the transformers whose caches return what `recurrent.StateCache` keeps
PACKED_LAYER_TYPES = frozenset([*_ATTENTION, *_RECURRENT, "mlp", "moe"])
_OWN_TOKENIZER = "give the model its own tokenizer, or enlarge it by resize_token_embeddings and save it"
_BERT = "puts a layer between its last hidden states and its output head, which the loss does not read"
_DRAFTER = "drafts for Gemma 4 from its keys and values, and reads no tokens"
_REFUSED = {
    **dict.fromkeys(["bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"], _BERT),
    **dict.fromkeys(["ernie", "megatron-bert", "modernbert-decoder", "rembert", "roberta"], _BERT),
    **dict.fromkeys(["roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"], _BERT),
    "xmod": _BERT,
    "dbrx": "keeps the matrices of its experts below each other in one",
    **dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], _DRAFTER),
    **dict.fromkeys(["inkling_mm_model", "inkling_text"], "scales its logits by logits_mup_width_multiplier"),
    "recurrent_gemma": "keeps its recurrent state in attributes of its layers, not in a cache",
    "reformer": "gives gradients only with dropout, of whole chunks, and with hashes at random",
    "rwkv": "divides its weights in place when it is evaluated",
    "xlm": "counts a padding token within a text as its end",
}
"""Model types that cannot be trained, with the reason."""


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise ValueError for a model that cannot be trained, by its configuration."""
    kind, found = config.model_type, model_class(config)
    problem = _REFUSED.get(kind)
    if config.is_encoder_decoder or (found is None and not hasattr(config, "auto_map")):
        problem = "is not a decoder-only language model of text"
    elif found is not None and auto_class(config)._model_mapping.get(found.config_class, None) is None:
        problem = "is saved as its text part alone, which no class loads again"
    elif problem is None and not hasattr(config.get_text_config(), "num_hidden_layers"):
        problem = "has several stacks of layers, none of which is the language model"
    if problem is not None:
        raise ValueError(f"model_type = {kind!r} {problem}; give another model, such as Qwen3")


def packing_obstacle(config: PreTrainedConfig) -> str | None:
    """Return why a model cannot be packed, by its configuration, or None. `verify_policy` checks the rest."""
    from transformers import __version__

    text, model = config.get_text_config(), model_class(config)
    kinds = {*(getattr(text, "layer_types", None) or ())}
    if getattr(text, "attention_chunk_size", None):
        kinds.add("chunked_attention")
    if unknown := sorted(kinds - PACKED_LAYER_TYPES):
        return f"it has layers of type {', '.join(unknown)}"
    if model is None:
        return None
    recurrent = not {*_RECURRENT}.isdisjoint(getattr(text, "layer_types", None) or ())
    names = vars(sys.modules[model.__module__])
    if "mamba_selective_scan" in names:
        return "no state can be given to its layers of Mamba 1"
    if (recurrent or "apply_mask_to_padding_states" in names) and Version(__version__) < _KEEPS_STATES:
        return f"transformers {__version__} does not return the states of its recurrent layers, as 5.17 does"
    if "ALL_ATTENTION_FUNCTIONS" not in names or not (model._supports_attention_backend or recurrent):
        return "it computes its attention by itself"
    return None


def longest_sequence(policy: Policy, prompts: Iterable[Sequence[int]], completion_length: int = 0) -> int:
    """Return the tokens of the longest prompt (token ids) and a completion of `completion_length`.

    Raises:
        ValueError: more tokens than positions, or a token beyond the embedding.
    """
    config = policy.base_model.config.get_text_config()
    rows = _embedding_rows(policy.base_model)
    longest = 0
    for ids in prompts:
        longest = max(longest, len(ids))
        if (token := max(ids, default=0)) >= rows:
            word = policy.tokenizer.convert_ids_to_tokens(token)
            problem = f"the data has the token {token} ({word!r}), and the model's embedding {rows} rows"
            raise ValueError(f"{problem}; {_OWN_TOKENIZER}")
    needed, most = longest + completion_length, positions(config)
    if most is not None and needed > most:
        completion = f" and {completion_length} of a completion" if completion_length else " and completion"
        stretch = ", or stretch its rotary positions by a rope_scaling (yarn) in its config.json"
        raise ValueError(
            f"{longest} tokens of the longest prompt{completion} need {needed} positions, and the model has "
            f"{most} (max_position_embeddings): lower dataset.max_prompt_length or max_completion_length"
            f"{stretch if getattr(config, 'rope_parameters', None) else ''}"
        )
    return needed


def positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions, stretched ones included; None: no limit."""
    most: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if most is None or rope.get("rope_type") not in ("yarn", "linear", "dynamic"):
        return most  # other types state the stretched number
    return max(most, int(rope["factor"] * (rope.get("original_max_position_embeddings") or most)))


def fix_rope(model: nn.Module, length: int | None) -> None:
    """Pin length-dependent RoPE (longrope, dynamic) to that of a sequence of `length` tokens.

    Otherwise log-probabilities would depend on the longest sequence in the batch. None: the model's own.
    """
    modules: Iterable[Any] = model.modules()
    for rope in modules:
        kinds = getattr(rope, "rope_type", ())
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]  # a dict has one per layer type
        if not {"longrope", "dynamic"}.isdisjoint(kinds):
            if not hasattr(rope, "length"):
                wrap_forward(rope, _rope_of_length)
            rope.length = length


def _rope_of_length(rope: Any, original_forward: Any, x: Tensor, position_ids: Tensor, *args: Any) -> Any:
    """Compute sines and cosines (B, T, D) of `position_ids` (B, T) as if the last position were there."""
    if rope.length is None:
        return original_forward(x, position_ids, *args)
    last = torch.full_like(position_ids[..., :1], rope.length - 1)
    found = original_forward(x, torch.cat([position_ids, last], -1), *args)
    return tuple(part[..., :-1, :] for part in found)


def require_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, path: str) -> None:
    """Raise ValueError if the embedding lacks rows for the vocabulary (without added tokens) or end token."""
    rows = _embedding_rows(model)
    if max(tokenizer.vocab_size - 1, tokenizer.eos_token_id or 0) >= rows:
        raise ValueError(
            f"model.path = {path!r}: the tokenizer has {len(tokenizer)} tokens, its end token is "
            f"{tokenizer.eos_token_id}, and the model's embedding has {rows} rows; {_OWN_TOKENIZER}"
        )


def _embedding_rows(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]


def backbone(model: PreTrainedModel) -> Any:
    """Return the model without its head."""
    inner: Any = model
    return inner.base_model if inner.base_model is not inner else inner.model  # Llama 4


@torch.no_grad()
def verify_policy(policy: Policy) -> None:
    """Compare a batch's logits with those of the model's own forward of each sequence.

    Raises:
        ValueError: they differ by more than rounding, or layers do not pass on their sliding window.
    """
    model = policy.base_model
    prompts, completions = _probes(model)
    table = CompletionTable.of(prompts, completions)
    (batch,) = pack(table, max_tokens=10_000, device=policy.device, shares_prompts=policy.packs)
    layout = PackedLayout(batch, policy.attention)
    sequences = [prompts[row] + completions[row] for row in batch.rows.tolist()]
    logits, own, allowed = policy.run(
        lambda: (
            policy.head.logits(policy.hidden_states(batch, layout)),
            [own_logits(model, sequence) for sequence in sequences],
            rounding_tolerance(model, sequences[0]),
        )
    )
    name = type(model).__name__
    expected = [of[len(prompts[row]) - 1 : -1] for of, row in zip(own, batch.rows.tolist(), strict=True)]
    error = relative_error(logits, torch.cat(expected))
    kind, part, remedy = "logits of padded rows", "head", "another model"
    if policy.packs:
        kind, part = "packed logits", "attention, its state or its head"
        remedy = "model.packing = none, or another model or model.attention"
    if not error <= allowed:
        raise ValueError(
            f"{kind} of {name} differ from the model's own by {error:.2g} of their norm ({allowed:.2g} "
            f"allowed): its {part} is not supported; use {remedy}"
        )
    window = _window(model.config.get_text_config())
    if policy.packs and window is not None and window not in layout.windows:
        raise ValueError(
            f"{name} has a window of {window} tokens (sliding_window), which its layers do not pass to the "
            f"packed attention; use {remedy}"
        )


def _window(config: PreTrainedConfig) -> int | None:
    """Return the sliding window of some layers; None: there is none."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if not getattr(config, "use_sliding_window", True) or not any("sliding" in kind for kind in kinds):
        return None
    return window if window is None or window < (positions(config) or math.inf) else None


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the relative error of logits (T, V), without constants that a softmax ignores."""
    logits, expected = (values - values.mean(dim=-1, keepdim=True) for values in (logits, expected))
    return float((logits - expected).norm() / expected.norm())


@torch.no_grad()
def rounding_tolerance(model: PreTrainedModel, ids: Sequence[int]) -> float:
    """Return the largest `relative_error` that rounding explains, from 1e-3 (TF32) to 0.1.

    It is twice the error of changing the last bit behind every layer.
    """
    generator = torch.Generator().manual_seed(0)
    plain, last_bit = own_logits(model, ids), torch.finfo(model.dtype).eps

    def change_last_bits(module: nn.Module, inputs: object, output: Any) -> Any:
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        signs = torch.randint(2, hidden.shape, generator=generator).to(hidden.device) * 2 - 1
        hidden = (hidden.float() * (1 + last_bit * signs)).to(hidden.dtype)
        return (hidden, *rest) if isinstance(output, tuple) else hidden

    modules = [model.get_input_embeddings(), *decoder_layers(model)]
    hooks = [module.register_forward_hook(change_last_bits) for module in modules]
    try:
        return min(0.1, max(1e-3, 2 * relative_error(own_logits(model, ids), plain)))
    finally:
        for hook in hooks:
            hook.remove()


def rounding_nats(dtype: torch.dtype, device_type: str = "cuda") -> float:
    """Return how far two programs' log-probabilities of a policy may differ, mean nats per token.

    In 16 bits they differ by 0.01 to 0.1, most where a router's choice flips.
    """
    if dtype != torch.float32:
        return 0.25
    return 1e-3 if device_type == "cpu" else 5e-2


def _probes(model: PreTrainedModel) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return prompts and completions, with shared prompts and a completion of one token."""
    generator = torch.Generator().manual_seed(0)
    prompts, completions = [], []
    for prompt, lengths in [(6, (4, 5)), (7, (3, 1)), (2, (6,))]:
        tokens = random_tokens(model, prompt + sum(lengths), generator)
        prompt_ids, *parts = (tuple(part.tolist()) for part in tokens.split([prompt, *lengths]))
        prompts += [prompt_ids] * len(parts)
        completions += parts
    return prompts, completions


def random_tokens(model: PreTrainedModel, count: int, generator: torch.Generator) -> Tensor:
    """Return (count,) int64 random tokens, among them the padding token, without placeholders of images."""
    config: Any = model.config
    placeholders = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    words = torch.arange(config.get_text_config().vocab_size)
    words = words[~torch.isin(words, torch.tensor([token for token in placeholders if token is not None]))]
    tokens = words[torch.randint(len(words), (count,), generator=generator)]
    embedding: Any = model.get_input_embeddings()
    padding = getattr(getattr(embedding, "base_layer", embedding), "padding_idx", None)  # within an adapter
    if padding is not None:
        tokens[2] = padding
    return tokens


def own_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Compute the logits (T, V) of a sequence in float32 by the model's own forward."""
    given: Any = {"input_ids": torch.tensor([ids], device=model.device), "use_cache": False}
    logits: Tensor = model(**given).logits
    return logits[0].float()
