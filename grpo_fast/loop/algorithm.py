"""The one loop of all algorithms: a step's completions are collected, learnt from, and told of."""

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
    """The state of a run. An algorithm says what a step's completions are and how they are learnt from."""

    config: TrainConfig  # of the run, or of its stage
    engine: Engine | None = None  # what generates, where anything does
    held_out: Sequence[Any] = ()  # what an evaluation is of
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
        self.on_progress: Callable[[int, int, int], None] | None = None  # told how every generation goes
        self.held = ExitStack()  # what ends with the run

    def train_step(self) -> StepResult:
        """One step of the loop."""
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
        """What a user reads of a step before the first, each line by its name."""

    def begin(self) -> None:
        """Before a step: what is drawn in it follows from it."""
        self.world.begin(self.step + 1, self.config.seed)

    @abstractmethod
    def collect(self, clock: Clock) -> tuple[CompletionTable, dict[str, float]]:
        """The step's completions with what is known of them, and metrics of it."""

    @abstractmethod
    def learn(self, table: CompletionTable, clock: Clock) -> dict[str, float]:
        """Change the policy; metrics of the change."""

    @abstractmethod
    def timings(self, table: CompletionTable, seconds: float) -> dict[str, float]:
        """What else a step took, of `seconds` in all."""

    def samples(self, table: CompletionTable) -> list[SampleRecord]:
        """Completions for a person to read."""
        return []

    @abstractmethod
    def evaluate(self, size: int | None = None) -> Any:
        """A score with its `interval`, the `n` it is of, and `metrics` beside it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """JSON-able; what a resumed run needs besides the weights and the optimizer."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` has given."""

    def __enter__(self) -> Algorithm:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()
