"""A model's processor of images: what its folder says of it, and transformers' own made of that."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from grpo_fast.data.images import INSTALL
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.source import loading, resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def processor_files(config: ModelConfig) -> list[str]:
    """What a model's folder says of its processor, beside the tokenizer."""
    from transformers.utils import cached_file

    found = []
    for name in FILES:
        with suppress(OSError):  # there is none
            found.append(cached_file(resolve_source(config.path), name, revision=config.revision))
    return [path for path in found if path is not None]


def load_processor(config: ModelConfig, architecture: PreTrainedConfig) -> Any:
    """transformers' processor of text and images; without that of videos, which needs torchvision.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: the model's folder has no processor.
    """
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # elsewhere by torchvision
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if find_spec("PIL") is None:
        raise ImportError(f"prompts with images need Pillow: {INSTALL}")
    try:
        known: Any = PROCESSOR_MAPPING[type(architecture)]
    except ModuleNotFoundError as error:  # some import it for what only others use
        kind = architecture.model_type
        raise ImportError(f"the processor of {kind} needs torchvision: {INSTALL}") from error

    class OfImages(known):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    source, origin = (
        resolve_source(config.path),
        {"revision": config.revision, "trust_remote_code": config.trust_remote_code},
    )
    with loading(config.path, source, "processor of images"):
        parts = {
            "image_processor": AutoImageProcessor.from_pretrained(source, **origin),
            "tokenizer": AutoTokenizer.from_pretrained(source, **origin),
        }
        settings, _ = known.get_processor_dict(source, **origin)
        return OfImages.from_args_and_dict([parts.get(name) for name in known.get_attributes()], settings)
