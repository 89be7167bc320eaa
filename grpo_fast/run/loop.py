"""The loop of a run, from its first step or its checkpoint's to the last."""

from __future__ import annotations

from grpo_fast.config.lookup import exits_are_errors
from grpo_fast.config.schema import TrainConfig
from grpo_fast.run.prepare import RunOutcome, prepared


def train(config: TrainConfig, *, resume: str | None = None, display: bool = True) -> RunOutcome:
    """Train to the last step, or to the end of the step in which a SIGINT, SIGTERM or SIGHUP comes.

    Args:
        config: the whole run.
        resume: "latest" continues from the newest intact checkpoint in `config.output_dir`, a path from it.
        display: show progress; the files of the run are written either way.

    Raises:
        RunInUse: another process trains in the directory.
        OSError: the directory cannot be written to.
        CheckpointError: the directory holds another run, or has no intact checkpoint; the message names the
            remedy.
        ValueError: the configuration contradicts the model or the data. Raised before any training.
        Exception: as a step raised it, after the last finished step was saved where that is possible.
    """
    with exits_are_errors(), prepared(config, resume, display=display) as run:
        run.begin()
        while run.goes_on():
            with run.world.all_succeed("the step"):
                result = run.trainer.train_step()
            with run.world.all_succeed("the record"):
                run.recorder.record(result)
        return run.finish()
