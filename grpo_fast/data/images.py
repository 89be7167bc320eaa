"""Read the images of a row, and process them for the model.

The format is TRL's: a column `image` or `images`, and a conversation whose parts of type `image` stand for
them in order. If no message has such a part, the images go before the text of the first user message.
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


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, compared by identity: a group shares one object."""

    images: tuple[Any, ...]  # as the row has them
    text: str  # the rendered prompt, with one placeholder for each image
    digest: str  # of sizes and pixels


class ImageReader:
    """Tokenize text with images by the model's processor.

    Args:
        load: returns the processor; called for the first image.
        files: the processor's files, which a saved model needs.
    """

    def __init__(self, load: Callable[[], Any], files: Sequence[str] = ()) -> None:
        self._load = load
        self.files = tuple(files)

    @cached_property
    def processor(self) -> Any:
        return self._load()

    def prompt(self, text: str, images: Sequence[Any]) -> tuple[tuple[int, ...], PromptImages]:
        """Return a prompt's tokens, with one per feature of each image, and its images."""
        digest = hashlib.sha256()
        for image in map(opened, images):
            digest.update(repr(image.size).encode() + image.tobytes())
        prompt = PromptImages(tuple(images), text, digest.hexdigest())
        return tuple(self.inputs(prompt)["input_ids"][0].tolist()), prompt

    def inputs(self, prompt: PromptImages) -> Mapping[str, Any]:
        """Return the model's inputs by name: `input_ids` (1, P), `pixel_values` and the like."""
        images, process = [opened(image) for image in prompt.images], self.processor
        try:
            inputs: Mapping[str, Any] = process(
                text=[prompt.text], images=[images], add_special_tokens=False, return_tensors="pt"
            )
        except Exception as error:
            problem = f"refuses {len(images)} images with the text {short(prompt.text)}: {error!r}"
            raise ValueError(f"the model's processor {problem}") from error
        return inputs


def opened(image: Any) -> Image:
    """Open an image in RGB: of Pillow, a path, encoded bytes, or {bytes, path}; or raise ValueError."""
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
    except Exception as error:  # Pillow's decoders raise any type
        raise ValueError(f"the image {short(image)} cannot be read: {error}") from error
    kinds = "a path, encoded bytes, {bytes, path} or an image of Pillow"
    raise ValueError(f"an image is {kinds}, got {short(image)}")


def beside(source: str, image: Any) -> Any:
    """Resolve an image's relative path against the folder of the dataset's file."""
    if isinstance(image, Mapping) and not image.get("bytes") and isinstance(image.get("path"), str):
        image = image["path"]
    folder = user_path(source, "dataset.source")
    if not isinstance(image, str) or not folder.exists():
        return image
    return str((folder if folder.is_dir() else folder.parent) / Path(image).expanduser())


def row_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row's columns `image` and `images`, of which only one may have any."""
    one, several = row.get("image"), row.get("images")
    if one is not None and several:
        raise ValueError("the row has both an 'image' and 'images'; leave one of the columns empty")
    if several is not None and not isinstance(several, list | tuple):
        raise ValueError(f"'images' is a list, got {short(several)}; put one image into a column 'image'")
    return [one] if one is not None else [*(several or ())]


def placed(turns: list[Message], images: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    """Return a row's conversation with a part for each image, and the images in their order.

    `images` are the columns'; parts may bring their own instead, as `{"type": "image", "image": ...}`.
    Raises ValueError if the numbers of images and of their parts differ.
    """
    in_parts = [part for turn in turns for part in _parts(turn["content"]) if part["type"] == "image"]
    if own := [part["image"] for part in in_parts if "image" in part]:
        if images or len(own) < len(in_parts):
            raise ValueError("some images are in the messages' parts and some are not; put all in one place")
        images = own
    if not images and not in_parts:
        return [{**turn, "content": text_of(turn["content"])} for turn in turns], []
    if in_parts and len(in_parts) != len(images):
        counts = f"{len(in_parts)} parts of type image, and the row {len(images)} images"
        raise ValueError(f"the messages have {counts}; give one for each")
    first = next((turn for turn in turns if turn["role"] == "user"), None)
    if not in_parts and first is None:
        raise ValueError("the row has images, and no message of the user to show them in")
    shown = []
    for turn in turns:
        before = [{"type": "image"} for _ in images] if turn is first and not in_parts else []
        parts = [{"type": "image"} if p["type"] == "image" else p for p in _parts(turn["content"])]
        shown.append({**turn, "content": before + parts})
    return shown, [*images]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
