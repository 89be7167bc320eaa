"""Write the loaded model and tokenizer of a Python call into the run's `inputs/`, and update the model."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.lookup import FROM_PYTHON
from grpo_fast.config.record import INPUTS_DIR
from grpo_fast.config.schema import TrainConfig
from grpo_fast.policy import Policy
from grpo_fast.run.arguments import refused

logger = logging.getLogger(__name__)
DTYPES = ("bfloat16", "float16", "float32")
LORA = {
    "r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
}
"""Options of peft's LoraConfig, and their keys of `model.lora`."""
UNREAD = (
    "task_type",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "auto_mapping",
)


class Loaded:
    """The model and the tokenizer of one call, where they are objects.

    A run reads both from files, so that other ranks, vLLM and a resumed run can read them too. `keep` writes
    them before the first step. `settle` follows once the run can start, `undo` where it cannot.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.tokenizer: Any = None
        self.resumes = False  # then the model may have the weights that the run gave back
        self._written: list[Path] = []  # since `settle`

    def section(self, model: Any) -> dict[str, Any]:
        """Return the section `model` of a transformers or peft model: its dtype, device and adapters."""
        if not (hasattr(model, "save_pretrained") and hasattr(model, "named_parameters")):
            raise refused("model", f"is a {type(model).__name__}: give a folder, a hub id or a loaded model")
        if len(devices := {weight.device for weight in model.parameters()}) != 1:
            problem = f"is divided over {len(devices)} devices; load it onto one, or give its path"
            raise refused("model", problem)
        (device,) = devices
        if device.type == "meta":
            raise refused("model", "has no weights (they are on the device meta); load it with them")
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise refused("model", f"has weights of {model.dtype}; load it in {', '.join(DTYPES)}")
        others = {weight.dtype for weight in model.parameters() if weight.is_floating_point()} - {model.dtype}
        if others:
            names = ", ".join(sorted(map(str, others)))
            logger.warning("model: some weights are %s; the run trains all in %s", names, model.dtype)
        self.model = model
        section: dict[str, Any] = {"path": f"model{FROM_PYTHON}", "dtype": dtype}
        if device.type == "cuda":  # a model on the CPU moves to a GPU where there is one, as in TRL
            section["device"] = str(device)
        if hasattr(model, "peft_config"):
            trained = (weight.any() for name, weight in model.named_parameters() if ".lora_B." in name)
            if not self.resumes and any(trained):
                raise refused(
                    "model",
                    "has trained adapters, from which a new run does not start: resume their run with more "
                    "max_steps; or give model.merge_and_unload(), and peft_config for new ones",
                )
            section["lora"] = lora_section(model.peft_config[model.active_adapter], "model.peft_config")
        if self._quantized:
            section["quantization"] = "nf4"
        return section

    @property
    def _quantized(self) -> bool:
        return Policy(self.model, self.tokenizer).quantized

    def keep(self, config: TrainConfig, *, fresh: bool) -> TrainConfig:
        """Write the objects into the run's folder, anew if `fresh`; return the configuration with paths."""
        folder = Path(config.output_dir).absolute() / INPUTS_DIR
        changes: dict[str, str] = {}
        if self.model is not None:
            changes["path"] = self._once(folder / "model", self._save, fresh)
        elif self.tokenizer is not None:
            save = self.tokenizer.save_pretrained
            changes["tokenizer"] = self._once(folder / "tokenizer", save, fresh)
        return config.model_copy(update={"model": config.model.model_copy(update=changes)})

    def _once(self, folder: Path, write: Callable[[Path], object], fresh: bool) -> str:
        if fresh or not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.tmp")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            write(unfinished)
            shutil.rmtree(_earlier(folder), ignore_errors=True)
            if folder.exists():
                folder.rename(_earlier(folder))
            self._written.append(folder)
            unfinished.rename(folder)
        return str(folder)

    def settle(self) -> None:
        """Delete the inputs of an earlier run."""
        while self._written:
            shutil.rmtree(_earlier(self._written.pop()), ignore_errors=True)

    def undo(self) -> None:
        """Restore the inputs of an earlier run; do nothing after `settle`."""
        while self._written:
            folder = self._written.pop()
            shutil.rmtree(folder, ignore_errors=True)
            if _earlier(folder).exists():
                _earlier(folder).rename(folder)

    def _save(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        from grpo_fast.policy.source import loading

        tokenizer, name = self.tokenizer, getattr(self.model.config, "_name_or_path", "")
        if tokenizer is None:
            if not name:
                problem = "is missing, and the loaded model names none; give its tokenizer"
                raise refused("processing_class", problem)
            with loading(name, name, "tokenizer"):
                tokenizer = AutoTokenizer.from_pretrained(name)
        Policy(self.model, tokenizer).save_pretrained(folder)

    def give_back(self, policy: Policy) -> None:
        """Copy the trained weights into the caller's model: adapters into adapters, else merged weights."""
        if self.model is None:
            return
        if hasattr(self.model, "peft_config"):
            trained = {name: weight.detach() for name, weight in policy.trainable().items()}
        elif self._quantized:
            logger.warning("model: its 4-bit weights stay as they were; run.policy has the trained model")
            return
        else:
            trained = dict(policy.named_weights())
        with torch.no_grad():
            self.model.load_state_dict(trained, strict=False)
            self.model.tie_weights()


def lora_section(given: Any, key: str = "peft_config") -> dict[str, Any]:
    """Return the section `model.lora` of a LoraConfig of peft; raise ConfigError for other options."""
    kind = getattr(given.peft_type, "value", given.peft_type)
    if kind != "LORA":
        raise refused(key, f"is {kind}; adapters here are LoRA: give a LoraConfig")
    options, defaults = given.to_dict(), type(given)().to_dict()
    section = {ours: options[theirs] for theirs, ours in LORA.items()}
    if isinstance(modules := section["target_modules"], set | tuple):
        section["target_modules"] = sorted(modules)
    if options.pop("use_rslora", False):
        section["alpha"] *= math.sqrt(section["r"])
    left = [name for name in options if name not in (*LORA, *UNREAD) and options[name] != defaults.get(name)]
    if left:
        problem = "has no equivalent in model.lora; leave it out"
        raise ConfigError("train", [Problem(f"{key}.{name}", problem, options[name]) for name in left])
    return section


def _earlier(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")
