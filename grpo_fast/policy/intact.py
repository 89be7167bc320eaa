"""Whether a checkpoint is its model's: every tensor there and finite, and a row for every token.

transformers fills what is missing with random numbers and says so in a table; here it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from grpo_fast.policy.finite import first_not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OLD_TABLES = (".inv_freq", ".attn.bias", ".attention.bias", ".masked_bias", ".position_ids")
"""Ends of names of constants that earlier versions of transformers saved among the weights."""

OWN_TOKENIZER = "give the model its own tokenizer, or enlarge it by resize_token_embeddings and save it"
_NAMED = 4  # tensors of a list; the others are counted


@contextmanager
def quietly() -> Iterator[None]:
    """transformers without its bars and its tables."""
    from transformers.utils import logging

    hook = logging.set_tqdm_hook(lambda make, args, settings: make(*args, **{**settings, "disable": True}))
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.set_tqdm_hook(hook)


@contextmanager
def loading(path: str, source: str | Path, what: str = "model") -> Iterator[None]:
    """What transformers cannot load is a ValueError of one sentence.

    Args:
        path: as `model.path` gives it.
        source: the folder or hub id that it leads to.
        what: "model" or "tokenizer".
    """
    try:
        with quietly():
            yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):  # they say what to do
        raise
    except Exception as error:
        told, folder = str(error).strip(), Path(source)
        reason = (told or repr(error)).splitlines()[0].rstrip(" .:")
        remedy = "give a folder as save_pretrained writes it, with all its files"
        if what == "tokenizer" and folder.is_dir():
            remedy = "put tokenizer.json and tokenizer_config.json of the model it was made from beside it"
        elif damaged := [name for file in sorted(folder.glob("*.safetensors")) if (name := _damaged(file))]:
            reason, remedy = ", ".join(damaged), "copy or download it again"
        elif "trust_remote_code" in told:
            reason = "it needs Python code from its own repository"
            remedy = "read that code, and allow it by model.trust_remote_code = true"
        elif "CONVERSION" in told:  # of the table that `quietly` leaves out
            reason = "the tensors of its experts do not fit together; some are missing or of another shape"
        elif not folder.is_dir():
            reason = f"there is no such folder, and from the hub: {reason}"
            remedy = "give a folder, or download it where the hub can be reached (HF_TOKEN if it is gated)"
        problem = f"model.path = {path!r} has no {what} that can be loaded: {reason}; {remedy}"
        raise ValueError(problem) from error


def _damaged(file: Path) -> str:
    """What is wrong where a safetensors file's header and length do not agree; empty where they do."""
    try:
        with safe_open(file, framework="pt"):
            return ""
    except SafetensorError as error:
        return f"{file.name} is damaged, or a pointer of Git LFS ({error})"


def load_whole(path: str, source: str | Path, **settings: Any) -> PreTrainedModel:
    """A causal language model, every weight of which comes from the checkpoint.

    Raises:
        ValueError: as `loading`; or tensors are missing, of another shape, of no use or not finite, by name.
    """
    from transformers import AutoModelForCausalLM

    with loading(path, source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, ignore_mismatched_sizes=True, output_loading_info=True, **settings
        )
    model, report = loaded
    _require_whole(model, report, path)
    return model


def _require_whole(model: PreTrainedModel, report: Mapping[str, Any], path: str) -> None:
    """transformers' report knows of tied weights, and of constants that need not be there."""
    shapes = [f"{name} {tuple(saved)} for {tuple(own)}" for name, saved, own in report["mismatched_keys"]]
    others = [name for name in report["unexpected_keys"] if not f".{name}".endswith(OLD_TABLES)]
    problems = {"missing": report["missing_keys"], "of another shape": shapes, "not the model's": others}
    if told := [f"{problem}: {listed(names)}" for problem, names in problems.items() if names]:
        raise ValueError(
            f"model.path = {path!r} does not hold the {type(model).__name__} that its config.json says "
            f"({'; '.join(told)}); give a causal language model with its own config.json, saved by "
            "save_pretrained"
        )
    if broken := first_not_finite(model.state_dict()):
        raise ValueError(
            f"model.path = {path!r}: {broken} holds NaN or infinity; the run that saved it had diverged, or "
            "the file is damaged: give an earlier checkpoint, or copy it again"
        )


def require_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, path: str) -> None:
    """The embedding has `rows` for the tokenizer's own words and its end token, or a ValueError names both.

    An added token may have none while no text has it, as the image token of Gemma 3's text models.
    """
    if max(tokenizer.vocab_size - 1, tokenizer.eos_token_id or 0) >= rows:
        raise ValueError(
            f"model.path = {path!r}: the tokenizer has {len(tokenizer)} tokens, its end token is "
            f"{tokenizer.eos_token_id}, and the model's embedding has {rows} rows; {OWN_TOKENIZER}"
        )


def listed(names: Iterable[str]) -> str:
    """`a, b and 3 more`."""
    first, rest = sorted(names)[:_NAMED], len([*names]) - _NAMED
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
