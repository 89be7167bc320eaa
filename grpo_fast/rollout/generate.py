"""Sample with transformers' `generate`: for recurrent layers, images, and other kinds of caches.

A logits processor lets the `Batch` sample each token, and forces it on `generate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    cache_utils,
)

from grpo_fast.data.images import ImageReader, PromptImages
from grpo_fast.rollout.batch import Batch

_PER_TOKEN = {"token_type_ids", "mm_token_type_ids"}  # outputs of processors


def takes_padding(model: Any) -> bool:
    """Return whether prompts of different lengths can be one batch, padded on the left.

    A model with a custom cache or without `position_ids` may treat padding as tokens.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = {type(layer).__module__ for layer in DynamicCache(config=config).layers}
    general = kinds == {cache_utils.__name__} and model._supports_default_dynamic_cache()
    return general and "position_ids" in inspect.signature(model.forward).parameters


def generate(model: PreTrainedModel, batch: Batch, image_reader: ImageReader | None = None) -> None:
    """Sample the completions of a batch that shares no prompts."""

    def sampled(_: Tensor, logits: Tensor) -> Tensor:
        if not batch.left:  # on a GPU `generate` stops a step late
            return logits
        tokens = batch.sample(logits)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def ended(*_: Any, **__: Any) -> Tensor:
        return ~batch.going

    # The model's generation_config may penalize repetition or set another temperature.
    with patch.object(model, "generation_config", GenerationConfig()):
        model.generate(  # type: ignore[operator]
            **_inputs(model, batch, image_reader),
            max_new_tokens=batch.max_new,
            do_sample=False,
            logits_processor=LogitsProcessorList([sampled]),
            stopping_criteria=StoppingCriteriaList([ended]),
        )


def _inputs(model: PreTrainedModel, batch: Batch, image_reader: ImageReader | None) -> dict[str, Tensor]:
    """Return the inputs of `generate`: prompts padded on the left, and the images of each row."""
    read: dict[PromptImages | None, Mapping[str, Tensor]] = {None: {}}
    for row in batch.pending:
        if row.images not in read and row.images is not None and image_reader is not None:
            read[row.images] = image_reader.inputs(row.images)
    given = [read[row.images] for row in batch.pending]
    takes = inspect.signature(model.forward).parameters
    names = {name for row in given for name in row if name in takes} - {"input_ids", "attention_mask"}
    inputs = {
        "input_ids": _padded([torch.tensor(prompt) for prompt in batch.prompts]),
        "attention_mask": _padded([torch.ones(len(prompt), dtype=torch.int64) for prompt in batch.prompts]),
    }
    for name in names & _PER_TOKEN:
        text = [torch.zeros(len(prompt), dtype=torch.int64) for prompt in batch.prompts]
        inputs[name] = _padded(
            [row[name][0] if name in row else own for row, own in zip(given, text, strict=True)]
        )
    for name in names - _PER_TOKEN:
        joined = torch.cat([row[name] for row in given if name in row])
        inputs[name] = joined.to(model.dtype) if joined.is_floating_point() else joined
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_side="left")
