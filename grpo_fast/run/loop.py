"""Run the training loop from the first step, or from a checkpoint, to the last step."""

from __future__ import annotations

from typing import Any

from grpo_fast.config.lookup import exits_are_errors
from grpo_fast.config.schema import TrainConfig
from grpo_fast.run.loaded import Loaded
from grpo_fast.run.prepare import RunOutcome, prepared


def train(
    config: TrainConfig,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    display: bool = True,
    loaded: Loaded | None = None,
) -> RunOutcome:
    """Train to the last step, or finish the current step after a SIGINT, SIGTERM or SIGHUP.

    Args:
        config: the whole run.
        resume: "latest" continues from the newest intact checkpoint in `config.output_dir`, or in the folder
            next to it that started last; a path continues from that checkpoint.
        overwrite: delete the run in `config.output_dir`; otherwise a new run gets a folder next to it.
        display: show progress; the files of the run are written either way.
        loaded: the model and the tokenizer of a Python call.

    Raises:
        RunInUse: another process trains in the directory.
        OSError: the directory cannot be written to.
        CheckpointError: the directory holds another run, or no intact checkpoint; it names the remedy.
        ValueError: the configuration contradicts the model or the data; raised before any training.
        Exception: any error of a step, after the last finished step was saved where that is possible.
    """
    options: Any = {"overwrite": overwrite, "display": display, "loaded": loaded or Loaded()}
    with exits_are_errors(), prepared(config, resume, **options) as run:
        run.begin()
        while run.goes_on():
            with run.world.all_succeed("the step"):
                result = run.trainer.train_step()
            with run.world.all_succeed("the record"):
                run.recorder.record(result)
        return run.finish()
