"""Log, show and checkpoint a run's steps, and save the last finished step after an error."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from grpo_fast.distributed.world import RankError
from grpo_fast.policy.optimizer import Diverged
from grpo_fast.policy.random_state import capture_rng
from grpo_fast.record.alerts import AlertMonitor
from grpo_fast.record.callbacks import Callbacks
from grpo_fast.record.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointSaveError,
    CheckpointStore,
    step_of,
)
from grpo_fast.record.display import Display
from grpo_fast.record.logs import RunLogs, StepResult, held_out_outcome
from grpo_fast.record.report import write_report

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.loop.algorithm import Algorithm


class Recorder:
    """Logs, checkpoints, alerts and display of a run, as the context of its steps on every rank.

    On an error it saves the last finished step, if the weights are still those of that step. After a step's
    FloatingPointError it raises Diverged, which names where to continue.
    """

    def __init__(
        self,
        trainer: Algorithm,
        config: TrainConfig,
        store: CheckpointStore,
        *,
        checkpoint: Checkpoint | None,
        show: bool,
        callbacks: Callbacks,
        code: Mapping[str, str],
    ) -> None:
        self.trainer, self.config, self.callbacks, self.code = trainer, config, callbacks, code
        self.run_dir = Path(config.output_dir)
        self.store, self.world = store, store.world
        self.monitor = AlertMonitor(config.alerts)
        if checkpoint:
            self.monitor.load_state_dict(checkpoint.state["alerts"])
            callbacks.load_state_dict(checkpoint.state.get("callbacks", {}))
        self.logs = RunLogs(self.run_dir, config.logging)
        self._stack = ExitStack()
        self._stack.callback(self.logs.close)
        if checkpoint:
            store.rewind(checkpoint.step)
        self.logs.rewind(checkpoint.step if checkpoint else -1)
        console = None if show else Console(quiet=True, force_terminal=False, force_jupyter=False)
        self.display = Display(
            config.max_steps, console=console, start_step=trainer.step, verbose=config.logging.verbose
        )
        self.say = self.display.message
        self.saved = checkpoint.step if checkpoint else None  # the step of the newest checkpoint
        self.capture()

    def __enter__(self) -> Recorder:
        self._stack.enter_context(self.display)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._stack:
            if error is None:
                return
            kinds = [isinstance(error, one) for one in (FloatingPointError, Diverged, CheckpointError)]
            try:
                with self.world.all_succeed("the error") as ranks:
                    ranks.append((*kinds, self.trainer.optimizer.mid_step))
            except RankError as lost:
                self.say(f"{type(error).__name__}, and step {self.trainer.step} cannot be saved: {lost}")
                return
            not_finite, bad_gradient, of_the_disk, mid_step = map(any, zip(*ranks, strict=True))
            if not_finite:
                raise self.diverged(error, bad_gradient, mid_step) from error
            if not of_the_disk:  # a CheckpointError names what is intact
                self.rescue(error, mid_step)

    def begin(self) -> None:
        """Score the held-out questions before the first step."""
        self.callbacks.call("on_train_begin", self.trainer.step, self.config, self.trainer.policy)
        if self.trainer.step == 0:
            evaluated = self.evaluate(None)
            self.logs.metrics(0, evaluated)
            self.watch(evaluated)
            if evaluated:
                self.callbacks.call("on_evaluate", 0, evaluated)
        self.capture()

    def record(self, result: StepResult) -> None:
        """Write and show a finished step, and run the evaluation and the save that are due."""
        step, config, timings = self.trainer.step, self.config, result.timings
        last = step == config.max_steps
        every, size = config.evaluation_schedule(len(self.trainer.held_out))
        evaluated: dict[str, float] = {}
        sampled = config.logging.samples_every and (step - 1) % config.logging.samples_every == 0
        try:
            if sampled:
                self.logs.samples(step, result.samples)
            if last or (every and step % every == 0):
                evaluated = self.evaluate(None if last else size)
        finally:
            metrics = result.metrics | evaluated
            self.logs.metrics(step, metrics, timings)
        self.display.update(step, metrics, timings)
        self.watch(metrics)
        self.callbacks.call("on_step_end", step, {**metrics, **timings})
        if evaluated:
            self.callbacks.call("on_evaluate", step, evaluated)
        self.capture()
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            try:
                self.save()
            except CheckpointSaveError as error:
                self.say(f"checkpoint of step {step} not saved: {error}; training goes on")

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Raise and clear alerts."""
        for alert in self.monitor.update(self.trainer.step, metrics):
            self.logs.alert(alert)
            self.say(alert.text)

    def evaluate(self, size: int | None) -> dict[str, float]:
        """Score the held-out questions, write and show the score, and return it with its metrics."""
        if not self.trainer.held_out:
            return {}
        evaluation = self.trainer.evaluate(size)
        step, n = self.trainer.step, evaluation.n
        name = "held-out" if n == len(self.trainer.held_out) else f"held-out, first {n}"
        figures = evaluation.score, evaluation.interval, n, evaluation.criterion
        self.logs.evaluation(step, name, *figures)
        self.display.evaluation(step, *figures)
        scored = {"eval/score": evaluation.score, "eval/score_high": evaluation.interval[1]}
        return scored | {f"eval/{k}": v for k, v in evaluation.metrics.items()}

    def capture(self) -> None:
        """Copy the state of a checkpoint besides its tensors, between two steps.

        The next step changes prompts and random states long before it changes a weight. Until then, this copy
        and the tensors are a checkpoint of the last step.
        """
        state = {
            "optimizer": self.trainer.optimizer.state(),
            "trainer": self.trainer.state_dict(),
            "alerts": self.monitor.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "code": self.code,
            "rng": capture_rng(),
        }
        # By pickle, as JSON takes far longer, and this runs at every step.
        self.captured, self.state = self.trainer.step, pickle.dumps(state)

    def save(self) -> Path:
        """Write a checkpoint of the captured step and call the callbacks; raise as the store does."""
        path = self._write_checkpoint()
        self.callbacks.call("on_save", self.captured, path)
        return path

    def _write_checkpoint(self) -> Path:
        self.logs.sync()
        tensors = self.trainer.optimizer.state_tensors()
        path = self.store.save(self.captured, tensors, pickle.loads(self.state))
        self.saved = self.captured
        return path

    def save_last(self) -> None:
        if self.trainer.step not in (0, self.saved):
            self.save()
        self.logs.require()

    def finish(self, signal: Signals | None) -> None:
        """Print the outcome and write the report, after the last save; `signal` stopped the run early."""
        stopped_by = signal.name if signal else self.callbacks.stopped_by
        if stopped_by:
            safe = f"saved at step {self.saved}" if self.saved else "nothing is trained yet"
            self.say(f"{stopped_by}: {safe}; continue with --resume")
        self.say(held_out_outcome(self.run_dir) or f"step {self.trainer.step} of {self.config.max_steps}")
        try:
            self.say(f"report: {write_report(self.run_dir)}")
        except (OSError, ValueError) as error:  # the run is saved nevertheless
            self.say(f"no report: {error}; `grpo-fast report {self.run_dir}` writes it")
        if self.saved:
            self.say(f"model: `grpo-fast export {self.run_dir} OUT` writes it for transformers and vLLM")
        self.callbacks.call("on_train_end", self.trainer.step, stopped_by)

    def rescue(self, error: BaseException, mid_step: bool) -> None:
        """Save the last finished step after an error, unless the update has changed its weights."""
        trainer, problem = self.trainer, type(error).__name__
        if mid_step:
            last = "there is no checkpoint yet" if self.saved is None else f"the last is of step {self.saved}"
            self.say(f"{problem} amid the update of step {trainer.step + 1}, which cannot be saved; {last}")
            return
        try:
            if trainer.policy.device.type == "cuda":
                torch.cuda.synchronize(trainer.policy.device)
            if self.captured != trainer.step:  # the step is finished, and its record has failed
                self.capture()
            if trainer.step not in (0, self.saved):
                self.say(f"{problem}: saving step {trainer.step}; interrupt to leave without")
                self._write_checkpoint()
        except Exception as second:
            self.say(f"{problem}, and step {trainer.step} could not be saved: {second}")
        else:
            if trainer.step:
                self.say(f"{problem}: step {trainer.step} is safe; continue with --resume")

    def diverged(self, error: BaseException, bad_gradient: bool, mid_step: bool) -> Diverged:
        """Return the error of a run whose values are not finite, with the checkpoint to continue from.

        That is the last step's only if the failed step had updated the weights; else its weights give NaN.
        """
        step = self.trainer.step
        lower = f"a lower optimizer.learning_rate ({self.trainer.optimizer.learning_rate:.3g} now)"
        if self.config.model.dtype == "float16":
            lower += ", or anew with model.dtype = bfloat16"
        paths = self.world.from_main("the checkpoints", self.store.paths)
        good = [path for path in paths if step_of(path) < step + mid_step]
        if not (step or mid_step):
            left = "nothing is trained yet, so it is the model or its precision: try model.dtype = float32"
        elif good:
            left = f"continue from the newest checkpoint before, --resume {good[-1]}, with {lower}"
        else:
            left = f"there is no checkpoint from before: start anew with checkpoint.every and {lower}"
            if step and bad_gradient and not mid_step:  # the weights are those of the last step
                with suppress(CheckpointSaveError, Diverged):
                    left += f"; `grpo-fast export {self._write_checkpoint()} OUT` writes step {step}"
        return Diverged(f"the run diverged after step {step}: {error}; {left}")
