"""Loaded models and tokenizers of a Python call: written into the run's `inputs/`, updated at the end."""

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

logger = logging.getLogger(__name__)
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
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

    A run reads both from files, as it does after a kill, on other ranks and in vLLM. `keep` writes them
    before the first step, and a resumed run reads what was written then. `settle` follows once the run can
    start, `undo` where it cannot.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.tokenizer: Any = None
        self._written: list[Path] = []  # since `settle`
        self.resumes = False  # so that the model may have the weights that the run gave back

    def section(self, model: Any) -> dict[str, Any]:
        """Return the section `model` of a transformers or peft model: its dtype, device and adapters.

        Raises:
            ConfigError: it is no such model, or cannot be trained as it is.
        """
        if not (hasattr(model, "save_pretrained") and hasattr(model, "named_parameters")):
            raise _refused("model", f"is a {type(model).__name__}: give a folder, a hub id or a loaded model")
        if len(devices := {weight.device for weight in model.parameters()}) != 1:
            raise _refused(
                "model", f"is divided over {len(devices)} devices; load it onto one, or give its path"
            )
        (device,) = devices
        if device.type == "meta":
            raise _refused("model", "has no weights (they are on the device meta); load it with them")
        if model.dtype not in DTYPES:
            raise _refused("model", f"has weights of {model.dtype}; load it in {', '.join(DTYPES.values())}")
        kinds = {weight.dtype for weight in model.parameters() if weight.dtype in DTYPES} - {model.dtype}
        if kinds:
            others = ", ".join(sorted(DTYPES[kind] for kind in kinds))
            logger.warning(
                "model: some of its weights are in %s; the run trains all in %s", others, model.dtype
            )
        self.model = model
        found: dict[str, Any] = {"path": f"model{FROM_PYTHON}", "dtype": DTYPES[model.dtype]}
        if device.type == "cuda":  # one on the CPU moves to a GPU where there is one, as in TRL
            found["device"] = str(device)
        if hasattr(model, "peft_config"):
            trained = (weight.any() for name, weight in model.named_parameters() if ".lora_B." in name)
            if not self.resumes and any(trained):
                raise _refused(
                    "model",
                    "has trained adapters, from which a new run does not start: resume their run with more "
                    "max_steps; or give model.merge_and_unload(), and peft_config for new ones",
                )
            found["lora"] = lora_section(model.peft_config[model.active_adapter], "model.peft_config")
        if self._quantized:
            found["quantization"] = "nf4"
        return found

    @property
    def _quantized(self) -> bool:
        return Policy(self.model, self.tokenizer).quantized

    def keep(self, config: TrainConfig, *, fresh: bool) -> TrainConfig:
        """Return the configuration with paths in the run's folder. Write there what is not there yet.

        Args:
            fresh: what is there is of an earlier run: write anew.
        """
        folder = Path(config.output_dir).absolute() / INPUTS_DIR
        changes: dict[str, str] = {}
        if self.model is not None:
            changes["path"] = self._once(folder / "model", self._save, fresh)
        elif self.tokenizer is not None:
            save = self.tokenizer.save_pretrained
            changes["tokenizer"] = self._once(folder / "tokenizer", save, fresh)
        return config.model_copy(update={"model": config.model.model_copy(update=changes)})

    def _once(self, folder: Path, write: Callable[[Path], object], fresh: bool) -> str:
        """Return the folder, written as a whole where it is not there yet."""
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
        """Delete what was there before."""
        while self._written:
            shutil.rmtree(_earlier(self._written.pop()), ignore_errors=True)

    def undo(self) -> None:
        """Put back what was there before; nothing after `settle`."""
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
                raise _refused(
                    "processing_class", "is missing, and the loaded model names none; give its tokenizer"
                )
            with loading(name, name, "tokenizer"):
                tokenizer = AutoTokenizer.from_pretrained(name)
        Policy(self.model, tokenizer).save_pretrained(folder)

    def give_back(self, policy: Policy) -> None:
        """Copy the trained weights into the caller's model: adapters into adapters, else merged ones."""
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
    """Return the section `model.lora` of a LoraConfig of peft.

    Raises:
        ConfigError: another method, or an option without an equivalent; it names each.
    """
    kind = getattr(given.peft_type, "value", given.peft_type)
    if kind != "LORA":
        raise _refused(key, f"is {kind}; adapters here are LoRA: give a LoraConfig")
    set_here, usual = given.to_dict(), type(given)().to_dict()
    section = {ours: set_here[theirs] for theirs, ours in LORA.items()}
    if isinstance(modules := section["target_modules"], set | tuple):
        section["target_modules"] = sorted(modules)
    if set_here.pop("use_rslora", False):
        section["alpha"] *= math.sqrt(section["r"])
    left = [name for name in set_here if name not in (*LORA, *UNREAD) and set_here[name] != usual.get(name)]
    if left:
        problem = "has no equivalent in model.lora; leave it out"
        raise ConfigError("train", [Problem(f"{key}.{name}", problem, set_here[name]) for name in left])
    return section


def _earlier(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")


def _refused(key: str, problem: str) -> ConfigError:
    return ConfigError("train", [Problem(key, problem)])
