"""The loop of a run, from its first step or its checkpoint's to the last."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from grpo_fast.config.schema import TrainConfig
from grpo_fast.run.prepare import RunOutcome, prepared

NO_FILES: Mapping[str, bytes] = MappingProxyType({})


def train(
    config: TrainConfig,
    *,
    resume: str | None = None,
    changed_code: bool = False,
    display: bool = True,
    files: Mapping[str, bytes] = NO_FILES,
) -> RunOutcome:
    """Train as configured, to the last step or to the end of the step that a SIGINT, SIGTERM or SIGHUP falls
    into.

    Args:
        config: the whole run.
        resume: "latest" continues from the newest intact checkpoint in `config.output_dir`, a path from it.
        changed_code: a resumed run may go on with rewards and the like whose code is not what it was.
        display: show progress; the files of the run are written either way.
        files: what the configuration names in the run's own directory, by name there.

    Raises:
        RunInUse: another process trains in the directory.
        OSError: the directory cannot be written to.
        CheckpointError: the directory holds another run, or has no intact checkpoint; the message names the
            remedy.
        ValueError: the configuration contradicts the model or the data. Raised before any training.
        Exception: as a step raised it, after the last finished step was saved where that is possible.
    """
    with prepared(config, resume, changed_code=changed_code, display=display, files=files) as run:
        run.begin()
        while run.goes_on():
            with run.world.all_succeed("the step"):
                result = run.trainer.train_step()
            with run.world.all_succeed("the record"):
                run.recorder.record(result)
        return run.finish()
