"""Prompts with images for our own decoders: an image's tokens as numbers of their own, and the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.policy.architecture import head_parameters
from grpo_fast.policy.vision import Vision, language_model

if TYPE_CHECKING:
    from grpo_fast.data.images import PromptImages
    from grpo_fast.rollout.types import Prompts


class ImagePrompts:
    """The prompts of one call. In each, the tokens of its images are one negative number, another one in
    another prompt: so decoders share between prompts what is the same, and nothing of other images."""

    def __init__(self, vision: Vision, prompts: Prompts, images: Sequence[PromptImages | None]) -> None:
        self.vision = vision
        self._images: list[PromptImages] = []
        self.prompts = [self._named(prompt, one) for prompt, one in zip(prompts, images, strict=True)]

    def _named(self, prompt: Sequence[int], images: PromptImages | None) -> tuple[int, ...]:
        if images is None:
            return tuple(prompt)
        if images not in self._images:
            self._images.append(images)
        number = -1 - self._images.index(images)
        return tuple(number if token == self.vision.token else token for token in prompt)

    def read(
        self, ids: Tensor, places: Tensor, cache: Any, mask: Tensor | None, common: int
    ) -> tuple[Tensor, Tensor, Any]:
        """Prefill U prompts, padded on the left, of which the cache has `common` tokens already.

        Args:
            ids: (U, T) int64, negative for images.
            places: (U, T) int64 of the tokens in their prompts.
            mask: (U, common + T) bool, false for padding; none: nothing is padded.

        Returns:
            (U, V) logits, (U, 1) the positions of the prompts' last tokens, and the cache.
        """
        vision, model = self.vision, self.vision.model
        least = ids.amin(1).tolist()
        seen = [vision.of(self._images[-1 - number]) if number < 0 else None for number in least]
        of_images = ids < 0
        given = vision.embedded(
            ids.masked_fill(of_images, vision.token), of_images, [one for one in seen if one is not None]
        )
        positions = places.expand(3, -1, -1).clone()
        for row, one in enumerate(seen):
            if one is not None and one.positions is not None:
                own = one.positions[:, common:]
                positions[:, row, -own.shape[1] :] = own.to(positions.device)
        attended: Any = mask
        if vision.both_ways:
            kinds = torch.nn.functional.pad(of_images.long(), (common, 0))
            attended = model.create_masks_for_generate(
                config=model.config,
                inputs_embeds=given["inputs_embeds"],
                attention_mask=mask,
                past_key_values=cache,
                position_ids=places,
                token_type_ids=kinds,
                mm_token_type_ids=kinds,
            )
        output = language_model(model)(
            **given,
            position_ids=positions if vision.three_positions else places,
            attention_mask=attended,
            past_key_values=cache,
            use_cache=True,
        )
        logits = head_parameters(model).logits(output.last_hidden_state[:, -1])
        return logits, positions[0, :, -1:], output.past_key_values
