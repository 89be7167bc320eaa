"""The training loop shared by all algorithms: rollout, update, metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from grpo_fast.data import PromptSampler
from grpo_fast.data.table import CompletionTable
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.loop.annotate import Annotator
from grpo_fast.policy import Policy, PolicyOptimizer
from grpo_fast.record.logs import Clock, SampleRecord, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.rollout import Engine


class Algorithm(ABC):
    """The state of a run. Subclasses collect a step's completions and update the policy on them."""

    config: TrainConfig  # of the run, or of its stage
    engine: Engine | None = None
    held_out: Sequence[Any] = ()  # the questions or groups of an evaluation
    criterion: str = ""  # when an answer to one of them is right

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        annotator: Annotator,
        prompts: PromptSampler,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.annotator = annotator
        self.prompts = prompts
        self.world = world
        self.step = 0
        self.on_progress: Callable[[int, int, int], None] | None = None  # gets every generation's progress
        self.held = ExitStack()  # closed at the end of the run

    def train_step(self) -> StepResult:
        """Run one step: rollout, update, metrics."""
        self.begin()
        clock = Clock()
        with clock("step"):
            table, metrics = self.collect(clock)
            metrics |= self.learn(table, clock)
        metrics |= self.optimizer.follow(metrics)
        self.step += 1
        self.optimizer.advance()
        timings = clock.seconds | self.timings(table, clock.seconds["time/step"])
        timings["memory/micro_batch_tokens"] = self.annotator.micro_batch_tokens
        return StepResult(metrics, timings, self.samples(table))

    @abstractmethod
    def described(self) -> dict[str, str]:
        """Return lines on what a step does, by name, for the run's opening."""

    def begin(self) -> None:
        """Prepare a step, whose random numbers depend on its number."""
        self.world.begin(self.step + 1, self.config.seed)

    @abstractmethod
    def collect(self, clock: Clock) -> tuple[CompletionTable, dict[str, float]]:
        """Return the step's completions and their metrics."""

    @abstractmethod
    def learn(self, table: CompletionTable, clock: Clock) -> dict[str, float]:
        """Update the policy on the completions, and return metrics."""

    @abstractmethod
    def timings(self, table: CompletionTable, seconds: float) -> dict[str, float]:
        """Return timings of a step that took `seconds`."""

    def samples(self, table: CompletionTable) -> list[SampleRecord]:
        """Return completions for samples.jsonl."""
        return []

    @abstractmethod
    def evaluate(self, size: int | None = None) -> Any:
        """Return a score with its `interval`, its number of questions `n`, and `metrics`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON, the state besides the weights and the optimizer."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""

    def __enter__(self) -> Algorithm:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()
