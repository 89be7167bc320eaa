"""Images in a packed batch: cached features of the frozen vision tower replace their tokens."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from grpo_fast.data.images import ImageReader, PromptImages
    from grpo_fast.policy.packing import PackedBatch

IMAGE_TYPES = frozenset(
    ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"]
)
"""Model types whose prompts may have images; a test compares each with the model's own forward."""
KEPT_BYTES = 2**31
"""Size of the least-recently-used cache of features in host memory."""


def sees_images(config: PreTrainedConfig) -> bool:
    return config.model_type in IMAGE_TYPES


def looks_both_ways(config: PreTrainedConfig) -> bool:
    """Return whether tokens of one image attend to each other in both directions."""
    text = config.get_text_config()
    return config.model_type == "gemma3" or getattr(text, "use_bidirectional_attention", None) == "vision"


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class of transformers that loads the model, with its vision tower if we support it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def model_class(config: PreTrainedConfig) -> Any:
    """Return the model's class, or None if transformers has no language model of the type."""
    return auto_class(config)._model_mapping.get(type(config), None)


def language_model(model: Any) -> Any:
    """Return a transformers model without its vision tower, if it has one."""
    return getattr(getattr(model, "base_model", model), "language_model", model)


def language_parameters(model: PreTrainedModel) -> set[nn.Parameter]:
    """Return the parameters of the language model and its head."""
    parts: list[nn.Module] = [language_model(model), model.get_output_embeddings()]
    return {parameter for part in parts for parameter in part.parameters()}


def freeze_vision(model: PreTrainedModel) -> None:
    """Freeze all but the language model and its head."""
    for parameter in {*model.parameters()} - language_parameters(model):
        parameter.requires_grad_(False)


@dataclass(frozen=True)
class Seen:
    """Features of a prompt's images, for n of the prompt's P tokens."""

    features: Tensor  # (n, H), in the model's dtype, on the CPU
    deep: tuple[Tensor, ...]  # (n, H) each, added after the first layers (DeepStack)
    positions: Tensor | None  # (3, P) int64: time, height and width; None: those of plain text
    beyond: int  # offset of the positions after the prompt


class Vision:
    """The vision tower of a model of `IMAGE_TYPES`, with a reader of the model's processor."""

    def __init__(self, model: PreTrainedModel, reader: ImageReader) -> None:
        config: Any = model.config
        self.model: Any = model
        self.reader = reader
        self.token: int = config.image_token_id
        self.both_ways = looks_both_ways(config)
        self._seen: OrderedDict[PromptImages, Seen] = OrderedDict()
        self._bytes = 0  # of `_seen`
        backbone: Any = model.base_model
        self._takes = inspect.signature(backbone.get_image_features).parameters

    @property
    def three_positions(self) -> bool:
        """Whether positions are those of time, height and width."""
        return hasattr(self.model.base_model, "get_rope_index")

    def of(self, images: PromptImages) -> Seen:
        """Return the features, from the cache if it has them."""
        if images not in self._seen:
            self._seen[images] = self._look(images)
            self._bytes += _nbytes(self._seen[images])
        self._seen.move_to_end(images)
        while len(self._seen) > 1 and self._bytes > KEPT_BYTES:
            self._bytes -= _nbytes(self._seen.popitem(last=False)[1])
        return self._seen[images]

    @torch.no_grad()
    def _look(self, images: PromptImages) -> Seen:
        backbone, inputs, dtype = self.model.base_model, self.reader.inputs(images), self.model.dtype
        moved = {
            name: value.to(self.model.device, dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
            if name in self._takes
        }
        output = backbone.get_image_features(**moved, return_dict=True)
        features = _joined(output.pooler_output).to(dtype)
        features = features.reshape(-1, features.shape[-1]).cpu()
        deep = (_joined(level).to(dtype).cpu() for level in getattr(output, "deepstack_features", ()))
        positions, beyond, ids = None, 0, inputs["input_ids"]
        if self.three_positions:
            kinds, grid = (ids == self.token).int(), inputs["image_grid_thw"]
            positions = backbone.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0][:, 0]
            beyond = int(positions.max()) + 1 - ids.shape[1]
        return Seen(features, tuple(deep), positions, beyond)

    def packed(self, batch: PackedBatch) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the language model's arguments for a packed batch, and the number of each token's image.

        The numbers, (T,) int64 and -1 for text, are None if images are attended to causally.
        """
        counts = batch.cu_seqlens.diff()
        with_images = torch.tensor([images is not None for images in batch.images], device=counts.device)
        in_prompt = (batch.segment_ids == 0) & with_images.repeat_interleave(counts)
        of_images = in_prompt & (batch.input_ids == self.token)
        seen = [None if images is None else self.of(images) for images in batch.images]
        given = self.embedded(batch.input_ids[None], of_images[None], [s for s in seen if s is not None])
        positions = batch.position_ids.expand(3, -1).clone()
        for (start, end), one in zip(pairwise(batch.cu_seqlens.tolist()), seen, strict=True):
            if one is not None and one.positions is not None:
                prompt = one.positions.shape[1]
                positions[:, start : start + prompt] = one.positions
                positions[:, start + prompt : end] += one.beyond
        given["position_ids"] = positions[:, None] if self.three_positions else batch.position_ids[None]
        return given, _runs(of_images) if self.both_ways else None

    def embedded(self, ids: Tensor, of_images: Tensor, seen: Sequence[Seen]) -> dict[str, Any]:
        """Return the language model's arguments for tokens (B, T), with features in place of `of_images`."""
        language, config = language_model(self.model), self.model.config
        words = ids.masked_fill(of_images, 0)
        given: dict[str, Any] = {}
        if config.model_type == "gemma4":  # which replaces all placeholders by padding
            pad = config.get_text_config().pad_token_id
            for name in ("image_token_id", "video_token_id", "audio_token_id"):
                words = words.masked_fill(ids == getattr(config, name), pad)
            if config.get_text_config().hidden_size_per_layer_input:
                given["per_layer_inputs"] = language.get_per_layer_inputs(words, None)
        embeds = language.get_input_embeddings()(words)
        features = torch.cat([one.features for one in seen]).to(embeds.device, embeds.dtype)
        given["inputs_embeds"] = embeds.masked_scatter(of_images[..., None], features)
        if deep := [*zip(*(one.deep for one in seen), strict=True)]:
            given["visual_pos_masks"] = of_images
            given["deepstack_visual_embeds"] = [torch.cat(level).to(embeds.device) for level in deep]
        return given


def _runs(of_images: Tensor) -> Tensor:
    """Return the number of the run of true that each of (T,) bool is in, (T,) int64; -1 elsewhere."""
    first = of_images & ~torch.cat([of_images.new_zeros(1), of_images[:-1]])
    return torch.where(of_images, first.cumsum(0) - 1, -1)


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    # Some towers return a tensor per image.
    return features if isinstance(features, Tensor) else torch.cat([*features])


def _nbytes(seen: Seen) -> int:
    return sum(part.nbytes for part in (seen.features, *seen.deep))
