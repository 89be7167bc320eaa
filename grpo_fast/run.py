"""A run from its configuration to its report: assembles the parts, resumes, survives signals and full disks."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_fast.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointSaveError,
    CheckpointStore,
    capture_rng,
    check_writable,
    restore_rng,
)
from grpo_fast.config import TrainConfig
from grpo_fast.config_io import dump_config, load_config
from grpo_fast.data import PromptSampler, exclude_overlap, load_prompts
from grpo_fast.display import Display
from grpo_fast.evaluate import Evaluation
from grpo_fast.experience import Group
from grpo_fast.jsonl import read_jsonl
from grpo_fast.metrics import EVALUATIONS_FILE, EvaluationLog, MetricsLog, SampleLog, SampleRecord
from grpo_fast.policy import PolicyOptimizer, load_policy
from grpo_fast.report import write_report
from grpo_fast.rewards import load_rewards
from grpo_fast.rollout import make_engine
from grpo_fast.summary import Score, before_after
from grpo_fast.trainer import StepResult, Trainer

CONFIG_FILE = "config.yaml"
CHECKPOINTS_DIR = "checkpoints"
# What a resumed run may do differently and still be the same run.
CHANGEABLE = {"output_dir", "max_steps", "threads", "checkpoint", "logging"}


def train(config: TrainConfig, *, resume: str | None = None, display: bool = True) -> Path:
    """Train as configured; returns the run's directory.

    Args:
        config: the whole run.
        resume: "latest" continues from the newest checkpoint in `config.output_dir`, a path from that one.
        display: show progress; the files of the run are written either way.

    Raises:
        CheckpointError: the directory cannot be written, holds another run, or its newest checkpoint is
            damaged; the message names the remedy.
        ValueError: the configuration contradicts the model or the data. Raised before any training.
    """
    run_dir = Path(config.output_dir)
    check_writable(run_dir, needed_bytes=0)
    store = CheckpointStore(run_dir / CHECKPOINTS_DIR, keep=config.checkpoint.keep)
    checkpoint = find_checkpoint(run_dir, store, config, resume)
    trainer = build_trainer(config)
    if checkpoint is not None:
        restore(trainer, checkpoint)
    check_writable(run_dir, needed_bytes=checkpoint_bytes(trainer))
    (run_dir / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest().listening())
        stack.enter_context(trainer.engine)
        Run(trainer, run_dir, store, stop, stack, checkpoint, display).execute()
    return run_dir


def find_checkpoint(
    run_dir: Path, store: CheckpointStore, config: TrainConfig, resume: str | None
) -> Checkpoint | None:
    """The checkpoint to continue from; none for a new run, or one that was stopped before its first."""
    earlier = run_dir / CONFIG_FILE
    if resume is None:
        if earlier.exists():
            raise CheckpointError(
                f"output_dir = {str(run_dir)!r} already holds a run; continue it with --resume, or choose another"
            )
        return None
    if not earlier.exists():
        raise CheckpointError(f"output_dir = {str(run_dir)!r} holds no run to resume; start it without --resume")
    changed = changed_keys(load_config(earlier, []), config)
    if changed:
        raise CheckpointError(
            f"the run in {str(run_dir)!r} was started with another configuration ({', '.join(changed)} differ): "
            f"resume with its own ({earlier}), or start a new run in another output_dir"
        )
    return store.load_latest() if resume == "latest" else store.load(Path(resume))


def changed_keys(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Sections in which two configurations would train differently."""
    old_values, new_values = old.model_dump(mode="json"), new.model_dump(mode="json")
    return [key for key in new_values if key not in CHANGEABLE and new_values[key] != old_values.get(key)]


def build_trainer(config: TrainConfig) -> Trainer:
    """Every part that the configuration names, at step 0."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    rewards = load_rewards(config.rewards)
    policy = load_policy(config.model, needs_reference=config.loss.needs_reference)
    prompts = load_prompts(config.dataset, policy.tokenizer)
    rewards.check_columns(list(prompts[0].columns))
    held_out = ()
    if config.evaluation.dataset is not None:
        held_out = load_prompts(config.evaluation.dataset, policy.tokenizer)
        prompts = exclude_overlap(prompts, held_out)
    return Trainer(
        config,
        policy=policy,
        engine=make_engine(config.rollout, policy),
        optimizer=PolicyOptimizer(policy.trainable(), config.optimizer, total_steps=optimizer_steps(config)),
        prompts=PromptSampler(prompts, config.prompts_per_step, seed=config.seed),
        rewards=rewards,
        held_out=held_out,
    )


def optimizer_steps(config: TrainConfig) -> int:
    return config.max_steps * config.num_iterations * config.minibatches


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a trainer where the checkpoint left it."""
    trainer.optimizer.load_state_tensors(checkpoint.tensors["optimizer"])
    trainer.optimizer.load_state(checkpoint.state["optimizer"])
    trainer.prompts.load_state_dict(checkpoint.state["prompts"])
    trainer.entropy_controller.load_state_dict(checkpoint.state["entropy_controller"])
    restore_rng(checkpoint.tensors["rng"], checkpoint.state["rng"])
    trainer.step = checkpoint.step


def checkpoint_bytes(trainer: Trainer) -> int:
    """Size of one checkpoint, the optimizer's two moments and fp32 masters included."""
    return sum(p.numel() * (p.element_size() + 12) for p in trainer.policy.trainable().values())


@dataclass
class StopRequest:
    """Set by SIGINT or SIGTERM: finish the step, save, leave. A second SIGINT interrupts at once."""

    signal: str | None = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        def note(number: int, _frame: object) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number).name

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class Run:
    """A trainer with its record on disk and its display."""

    def __init__(
        self,
        trainer: Trainer,
        run_dir: Path,
        store: CheckpointStore,
        stop: StopRequest,
        stack: ExitStack,
        checkpoint: Checkpoint | None,
        show: bool,
    ) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.run_dir = run_dir
        self.store = store
        self.stop = stop
        self.metrics = MetricsLog(run_dir, self.config.logging, run_name=run_dir.name)
        self.samples = SampleLog(run_dir)
        self.evaluations = EvaluationLog(run_dir)
        offsets = checkpoint.state["offsets"] if checkpoint else {}
        for name, log in self.logs().items():
            stack.callback(log.close)
            log.truncate(offsets.get(name, 0))
        display = Display(self.config.max_steps, start_step=trainer.step)
        self.display = stack.enter_context(display) if show else None

    def logs(self) -> dict[str, MetricsLog | SampleLog | EvaluationLog]:
        return {"metrics": self.metrics, "samples": self.samples, "evaluations": self.evaluations}

    def execute(self) -> None:
        """Steps until the last one or a stop request; then the closing score, the checkpoint and the report."""
        trainer, config = self.trainer, self.config
        if trainer.step == 0:
            self.metrics.log(0, self.evaluate(None))
        saved = trainer.step
        while trainer.step < config.max_steps and not self.stop.signal:
            result = trainer.train_step()
            self.record(result)
            if config.checkpoint.every and trainer.step % config.checkpoint.every == 0:
                saved = self.save() or saved
        if saved != trainer.step:
            self.save(must=True)
        if self.stop.signal:
            self.say(f"{self.stop.signal}: saved at step {trainer.step}; continue with --resume")
        self.say(self.outcome())
        self.say(f"report: {write_report(self.run_dir)}")

    def record(self, result: StepResult) -> None:
        """Write and show a finished step, with the held-out score where one is due."""
        step, config = self.trainer.step, self.config
        metrics, timings = result.metrics, result.timings | {"memory/peak_bytes": peak_memory(self.trainer)}
        last = step == config.max_steps
        if last or (config.evaluation.every and step % config.evaluation.every == 0):
            metrics = metrics | self.evaluate(None if last else config.evaluation.size)
        self.metrics.log(step, metrics, timings)
        if config.logging.samples_every and (step - 1) % config.logging.samples_every == 0:
            self.samples.write(step, self.pick_samples(result.groups))
        if self.display:
            self.display.update(step, metrics, timings)

    def evaluate(self, size: int | None) -> dict[str, float]:
        """Score the held-out questions, write it down, show it."""
        if not self.trainer.held_out:
            return {}
        evaluation: Evaluation = self.trainer.evaluate(size)
        step, n = self.trainer.step, evaluation.n
        name = "held-out" if n == len(self.trainer.held_out) else f"held-out, first {n}"
        self.evaluations.write(step, name, evaluation.score, evaluation.interval, n)
        if self.display:
            self.display.evaluation(step, evaluation.score, evaluation.interval, n)
        return {"eval/score": evaluation.score}

    def save(self, *, must: bool = False) -> int | None:
        """Write a checkpoint; a failed one loses nothing, so unless it is the last the run goes on."""
        trainer = self.trainer
        rng_tensors, rng_state = capture_rng()
        try:
            self.store.save(
                trainer.step,
                tensors={
                    "trainable": trainer.policy.trainable(),
                    "optimizer": trainer.optimizer.state_tensors(),
                    "rng": rng_tensors,
                },
                state={
                    "optimizer": trainer.optimizer.state(),
                    "prompts": trainer.prompts.state_dict(),
                    "entropy_controller": trainer.entropy_controller.state_dict(),
                    "rng": rng_state,
                    "offsets": {name: log.offset for name, log in self.logs().items()},
                },
            )
        except CheckpointSaveError as error:
            if must:
                raise
            self.say(f"checkpoint of step {trainer.step} not saved: {error}; training goes on")
            return None
        return trainer.step

    def pick_samples(self, groups: list[Group]) -> list[SampleRecord]:
        """The first completion of each of a few groups."""
        names = self.trainer.rewards.names
        return [
            SampleRecord(
                prompt=self.trainer.policy.tokenizer.decode(group.prompt.token_ids),
                completion=group.completions[0].text,
                rewards=dict(zip(names, group.reward_table[0].tolist(), strict=True)),
                reward=group.rewards[0].item(),
                advantage=group.advantages[0][0],
                truncated=group.completions[0].truncated,
                num_tokens=len(group.completions[0].token_ids),
            )
            for group in groups[: self.config.logging.samples]
        ]

    def outcome(self) -> str:
        """Held-out score before → after."""
        scores = [e for e in read_jsonl(self.run_dir / EVALUATIONS_FILE) if e["name"] == "held-out"]
        if len(scores) < 2:
            return f"step {self.trainer.step} of {self.config.max_steps}"
        first, last = (Score(e["score"], tuple(e["interval"]), e["n"]) for e in (scores[0], scores[-1]))
        return f"held-out score: {before_after(first, last)}"

    def say(self, text: str) -> None:
        if self.display:
            self.display.message(text)


def peak_memory(trainer: Trainer) -> int:
    """Bytes at the highest: of the GPU's allocator, else of the process."""
    if trainer.policy.device.type == "cuda":
        return torch.cuda.max_memory_allocated(trainer.policy.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
