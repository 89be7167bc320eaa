"""Prompts with images: what a row has of them, and what a model's processor makes of them.

The format is TRL's: a column `image` or `images` beside a conversation, whose parts of type `image` stand for
them in order. Where no message has such a part, the first of the user gets them before its text.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.config.paths import user_path
from grpo_fast.config.section import short
from grpo_fast.data.types import Message, text_of

if TYPE_CHECKING:
    from PIL.Image import Image

INSTALL = "pip install 'grpo-fast[images]'"
Turns = list[Message]


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt; the prompts of a group share one object, by which they are known."""

    images: tuple[Any, ...]  # as the row has them
    text: str  # the rendered prompt, with one placeholder for each image
    digest: str  # of what they show


class ImageReader:
    """Makes tokens and a model's inputs of text with images, by the model's processor.

    Args:
        load: gives the processor, when the first image comes; its errors say what is missing.
        files: the processor's files, which a saved model needs.
    """

    def __init__(self, load: Callable[[], Any], files: Sequence[str] = ()) -> None:
        self._load = load
        self.files = tuple(files)

    @cached_property
    def processor(self) -> Any:
        """transformers' processor."""
        return self._load()

    def prompt(self, text: str, images: Sequence[Any]) -> tuple[tuple[int, ...], PromptImages]:
        """The prompt's tokens, as many for each image as the model has features of it, and its images.

        Raises:
            ValueError: an image that cannot be read, or text that has not a placeholder for each.
        """
        digest = hashlib.sha256()
        for image in map(opened, images):
            digest.update(repr(image.size).encode() + image.tobytes())
        kept = PromptImages(tuple(images), text, digest.hexdigest())
        return tuple(self.inputs(kept)["input_ids"][0].tolist()), kept

    def inputs(self, prompt: PromptImages) -> Mapping[str, Any]:
        """Tensors by the names of the model's arguments: `input_ids` (1, P), `pixel_values` and the like."""
        images, process = [opened(image) for image in prompt.images], self.processor
        try:
            given: Mapping[str, Any] = process(
                text=[prompt.text], images=[images], add_special_tokens=False, return_tensors="pt"
            )
        except Exception as error:
            raise ValueError(
                f"the model's processor refuses {len(images)} images with the text {short(prompt.text)}: "
                f"{error!r}"
            ) from error
        return given


def opened(image: Any) -> Image:
    """In RGB: an image of Pillow's, a path, encoded bytes, or both as `datasets` has them.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: none of these, or none that Pillow reads.
    """
    try:
        from PIL import Image as pillow
    except ImportError as error:
        raise ImportError(f"images need Pillow: {INSTALL}") from error
    found = image
    if isinstance(found, Mapping):
        found = found.get("bytes") or found.get("path")
    try:
        if isinstance(image, Mapping) and isinstance(image.get("bytes"), str):  # JSON has no bytes
            found = base64.b64decode("".join(image["bytes"].split()), validate=True)
        if isinstance(found, bytes):
            found = pillow.open(io.BytesIO(found))
        elif isinstance(found, str | Path):
            path = Path(found).expanduser()
            if path.exists() and not path.is_file():  # reading a pipe would wait for its writer
                raise OSError("it is no regular file")
            found = pillow.open(path)
        if isinstance(found, pillow.Image):
            return found.convert("RGB")
    except Exception as error:  # Pillow's decoders raise all sorts of things
        raise ValueError(f"the image {short(image)} cannot be read: {error}") from error
    raise ValueError(
        f"an image is a path, encoded bytes, {{bytes, path}} or an image of Pillow's, got {short(image)}"
    )


def beside(source: str, image: Any) -> Any:
    """An image whose relative path is one beside the data's file, with its whole path."""
    if isinstance(image, Mapping) and not image.get("bytes") and isinstance(image.get("path"), str):
        image = image["path"]
    folder = user_path(source, "dataset.source")
    if not isinstance(image, str) or not folder.exists():
        return image
    return str((folder if folder.is_dir() else folder.parent) / Path(image).expanduser())


def row_images(row: Mapping[str, Any]) -> list[Any]:
    """What the columns `image` and `images` of a row have; empty where it has none.

    Raises:
        ValueError: both columns have something, or `images` is no list.
    """
    one, several = row.get("image"), row.get("images")
    if one is not None and several:
        raise ValueError("the row has both an 'image' and 'images'; leave one of the columns empty")
    if several is not None and not isinstance(several, list | tuple):
        raise ValueError(f"'images' is a list, got {short(several)}; one image goes into a column 'image'")
    return [one] if one is not None else [*(several or ())]


def placed(turns: Turns, images: Sequence[Any]) -> tuple[Turns, list[Any]]:
    """A row's conversation in parts, each image at its place, and the images in the order of their parts.

    Args:
        images: the columns'; parts may bring their own, as `{"type": "image", "image": ...}`, instead.

    Raises:
        ValueError: there are not as many images as parts for them.
    """
    in_parts = [part for turn in turns for part in _parts(turn["content"]) if part["type"] == "image"]
    if own := [part["image"] for part in in_parts if "image" in part]:
        if images or len(own) < len(in_parts):
            raise ValueError("some images are in the messages' parts and some are not; put all in one place")
        images = own
    if not images and not in_parts:
        return [{**turn, "content": text_of(turn["content"])} for turn in turns], []
    asks = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), None)
    if in_parts:
        asks = None
    elif asks is None:
        raise ValueError("the row has images, and no message of the user to show them in")
    if in_parts and len(in_parts) != len(images):
        raise ValueError(
            f"the messages have {len(in_parts)} parts of type image, and the row {len(images)} images; give "
            "one for each"
        )
    shown = []
    for number, turn in enumerate(turns):
        before = [{"type": "image"} for _ in images] if number == asks else []
        parts = [{"type": "image"} if p["type"] == "image" else p for p in _parts(turn["content"])]
        shown.append({**turn, "content": before + parts})
    return shown, [*images]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
