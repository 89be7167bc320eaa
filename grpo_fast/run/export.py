"""Export a run's trained weights for transformers and vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError

from grpo_fast.config.load import load_config
from grpo_fast.config.paths import user_path
from grpo_fast.config.record import CHECKPOINTS_DIR, CONFIG_FILE
from grpo_fast.config.schema import TrainConfig
from grpo_fast.policy import Policy, load_policy
from grpo_fast.policy.optimizer import MASTER, require_same_shapes
from grpo_fast.record.checkpoint import CheckpointStore


def export_run(
    source: str | Path, out: str | Path, *, adapter: bool = False, trust_remote_code: bool = False
) -> Path:
    """Write the newest model of a run, or of one checkpoint, with its tokenizer; return the folder.

    Args:
        adapter: write only the LoRA adapter. Otherwise it is merged.
        trust_remote_code: run the Python code of the model's repository. The run's own file cannot set it,
            since another person may have written that file.

    Raises:
        ValueError: `out` is a GGUF file, or there is no adapter.
        FileNotFoundError: `source` is neither a run nor a checkpoint of one.
        FileExistsError: `out` holds files already.
        OSError: `out` cannot be written; nothing is left of it.
    """
    out = user_path(out, "OUT")
    if out.suffix == ".gguf":
        raise ValueError(
            f"{out}: export writes a folder, and llama.cpp makes GGUF of it: `python convert_hf_to_gguf.py "
            f"FOLDER --outfile {out}`, of https://github.com/ggml-org/llama.cpp"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder; give another name")
    run_dir, checkpoint = locate(user_path(source, "RUN"))
    unfinished = out.with_name(f"{out.name}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # a killed export left it
        unfinished.mkdir(parents=True)  # fails before weights are read where nothing can be written
        config = load_config(run_dir, {"model.trust_remote_code": trust_remote_code})
        policy, _ = trained_policy(config, run_dir, checkpoint)
        (policy.save_adapter if adapter else policy.save_pretrained)(unfinished)
        unfinished.rename(out)
    except SafetensorError as error:
        raise OSError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return out


def locate(source: Path) -> tuple[Path, Path | None]:
    """Return (run's folder, checkpoint's folder or None for a whole run), or raise FileNotFoundError."""
    if (source / CONFIG_FILE).is_file():
        return source, None
    run_dir = source.parent.parent
    if source.is_dir() and source.parent.name == CHECKPOINTS_DIR and (run_dir / CONFIG_FILE).is_file():
        return run_dir, source
    raise FileNotFoundError(
        f"{source} is neither a run's directory, with {CONFIG_FILE} in it, nor one of its {CHECKPOINTS_DIR}/"
    )


def trained_policy(config: TrainConfig, run_dir: Path, checkpoint: Path | None = None) -> tuple[Policy, int]:
    """Load the policy with the weights of a checkpoint, by default the newest; return it and its step."""
    store = CheckpointStore(run_dir / CHECKPOINTS_DIR)
    found = store.load_latest() if checkpoint is None else store.load(checkpoint)
    if found is None:
        raise FileNotFoundError(
            f"{run_dir} has no checkpoint yet: let it reach its first, or name {run_dir / CONFIG_FILE} for "
            "the model that it starts from"
        )
    policy = load_policy(config.model)
    weights = policy.saved_weights()
    saved = {name: tensor for name, tensor in found.tensors.items() if name.startswith(MASTER)}
    require_same_shapes("the saved weights", saved, weights)
    found.load(weights)
    return policy, found.step
