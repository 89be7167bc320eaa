"""The cycle of engine and trainer: in order, with current weights, usable after a failure in any phase."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_fast.loop import update
from grpo_fast.loop.trainer import Trainer
from grpo_fast.rollout.handover import PARTS
from grpo_fast.run import build


class StrictEngine:
    """A real engine behind the protocol's rules: it drops its weights in `sleep` and raises on misuse."""

    name = "strict"

    def __init__(self, engine: Any, policy: Any) -> None:
        self.engine, self.policy = engine, policy
        engine.wake()
        self.calls: list[str] = []
        self.failing: tuple[str, BaseException] | None = None  # a phase that raises once
        self.room: Callable[[], bool] = lambda: True  # to wake in
        self.asleep = self.can_shrink = False
        self.weights: dict[str, torch.Tensor] = {}

    def note(self, phase: str) -> None:
        self.calls.append(phase)
        if self.failing is not None and self.failing[0] == phase:
            error, self.failing = self.failing[1], None
            raise error

    def generate(self, prompts: Any, n: int, sampling: Any, *, observer: Any = None) -> Any:
        current = self.policy.trainable()
        assert not self.asleep and all(torch.equal(self.weights[name], p) for name, p in current.items())
        self.note("generate")
        return self.engine.generate(prompts, n, sampling, observer=observer)

    def sleep(self) -> None:
        self.note("sleep")
        self.asleep, self.weights = True, {}

    def sync(self, policy: Any) -> None:
        self.note("sync")
        self.weights = {name: p.detach().clone() for name, p in policy.trainable().items()}

    def wake(self) -> None:
        assert self.weights
        if not self.room():
            raise RuntimeError("could not take back its memory (kv_cache): CUDA Error: out of memory")
        self.note("wake")
        self.asleep = False

    def freed(self) -> int:
        return sum(p.nbytes for p in self.policy.trainable().values()) if self.asleep else 0

    def __enter__(self) -> StrictEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.calls.append("exit")


@pytest.fixture
def strict(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Trainer, StrictEngine]]:

    def strict(**sections: Any) -> tuple[Trainer, StrictEngine]:
        trainer = make_trainer(**sections)
        engine = StrictEngine(trainer.engine, trainer.policy)
        trainer.engine = trainer.handover.engine = engine
        engine.sleep()
        engine.calls.clear()
        return trainer, engine

    return strict


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.policy.trainable().values()]


def test_each_step_is_generate_sleep_update_sync_wake(strict) -> None:
    trainer, engine = strict()
    timings = [trainer.train_step().timings for _ in range(2)][-1]
    trainer.evaluate(2)

    assert engine.calls == ["sync", "wake", "generate", "sleep"] * 2 + ["sync", "wake", "generate"]
    phases = [f"time/{phase}" for phase in ("sync", "wake", "sleep", "offload", "reload")]
    assert timings["time/exchange"] == pytest.approx(sum(timings[phase] for phase in phases))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_changes_no_step(strict, seed: int, dtype: str) -> None:
    results = []
    for parts in ([], list(PARTS)):
        sections = {"seed": seed, "loss": {"beta": 0.1}, "model": {"dtype": dtype}}
        trainer, _ = strict(memory={"offload": parts or "none"}, **sections)
        metrics = [trainer.train_step().metrics for _ in range(2)]
        results.append((metrics, [weight.tolist() for weight in weights(trainer)]))
        trainer.handover.to_engine()
        assert trainer.handover.away == set(parts)
        buffers = trainer.optimizer.gradient_buffers().values()
        held = any(buffer.untyped_storage().nbytes() for buffer in buffers)
        assert held == (dtype == "bfloat16" and not parts)
    assert results[0] == results[1]


def update_fails(trainer: Trainer, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """One backward of the coming update raises, after it has left a gradient."""
    loss, failed = update.packed_loss, []

    def once(*args: Any, **options: Any) -> Any:
        out = loss(*args, **options)
        if not failed:
            failed.append(True)
            out.loss.backward(retain_graph=True)
            raise error
        return out

    monkeypatch.setattr(update, "packed_loss", once)


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ("generate", KeyboardInterrupt()),
        ("sleep", ValueError("bug")),
        ("update", KeyboardInterrupt()),
        ("update", ValueError("bug")),
        ("update", torch.OutOfMemoryError("no memory")),
        ("sync", torch.OutOfMemoryError("no memory")),
        ("wake", KeyboardInterrupt()),
    ],
)
def test_after_a_failure_in_any_phase_engine_and_trainer_go_on(
    strict, monkeypatch: pytest.MonkeyPatch, phase: str, error: BaseException
) -> None:
    trainer, engine = strict(memory={"offload": list(PARTS)})
    trainer.train_step()
    before = weights(trainer)

    if phase == "update":
        update_fails(trainer, error, monkeypatch)
    else:
        engine.failing = (phase, error)
    if phase == "update" and isinstance(error, torch.OutOfMemoryError):
        trainer.train_step()  # in smaller micro-batches
        assert trainer.update.annotator.budget.limit < trainer.config.micro_batch_tokens
    else:
        with pytest.raises(type(error)):
            trainer.train_step()
        assert all(torch.equal(a, b) for a, b in zip(weights(trainer), before, strict=True))
        assert trainer.step == 1 and not trainer.optimizer.mid_step
        trainer.handover.to_trainer()
        buffers = trainer.optimizer.gradient_buffers().values()
        assert all(buffer.untyped_storage().nbytes() == buffer.nbytes for buffer in buffers)

    trainer.evaluate(2)
    assert trainer.train_step().metrics["update/skipped"] == 0
    assert not all(torch.equal(a, b) for a, b in zip(weights(trainer), before, strict=True))


def test_a_gradient_of_a_failed_update_is_not_in_the_next_one(
    strict, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, _ = strict(seed=seed)
    expected = undisturbed.train_step()
    trainer, _ = strict(seed=seed)
    state = trainer.state_dict()
    update_fails(trainer, ValueError("bug"), monkeypatch)
    with pytest.raises(ValueError, match="bug"):
        trainer.train_step()
    trainer.load_state_dict(state)

    assert trainer.train_step().metrics == expected.metrics


def test_an_engine_without_room_gets_all_that_can_go_or_says_why(strict, caplog) -> None:
    trainer, engine = strict(model={"dtype": "bfloat16"})
    trainer.train_step()
    assert not trainer.handover.away
    engine.room = lambda: trainer.handover.away == set(PARTS)

    trainer.train_step()

    assert "the trainer offloads all it can" in caplog.text
    assert trainer.train_step().metrics["update/skipped"] == 0
    engine.room = lambda: False
    with pytest.raises(RuntimeError, match="kv_cache"):
        trainer.train_step()

    def shrink() -> None:
        engine.can_shrink, engine.room = False, lambda: True
        engine.sleep()

    engine.can_shrink, engine.shrink = True, shrink
    assert trainer.train_step().metrics["update/skipped"] == 0
    engine.room = lambda: False
    with pytest.raises(RuntimeError, match="kv_cache"):
        trainer.train_step()


def test_an_engine_is_closed_where_the_rest_of_the_trainer_cannot_be_built(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine, engines = build.make_engine, []

    def engine(section: Any, policy: Any, **options: Any) -> StrictEngine:
        engines.append(StrictEngine(make_engine(section, policy, **options), policy))
        return engines[-1]

    def full(*_: object, **__: object) -> None:
        assert engines[0].asleep
        raise torch.OutOfMemoryError("no room for the masters")

    monkeypatch.setattr(build, "make_engine", engine)
    monkeypatch.setattr(build, "PolicyOptimizer", full)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer()
    assert engines[0].calls == ["sleep", "exit"]


@pytest.mark.gpu
def test_offloaded_state_frees_the_gpu_and_is_not_there_in_a_backward(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {}
    for offload in ("none", list(PARTS)):
        model = {"device": "cuda", "dtype": "bfloat16"}
        sections = {"model": model, "loss": {"beta": 0.1}, "rollout": {"engine": "transformers"}}
        trainer = make_trainer(**sections, memory={"offload": offload})
        losses = [trainer.train_step().metrics["grad_norm"] for _ in range(3)]
        before = torch.cuda.memory_allocated()
        trainer.handover.to_engine()
        generating = torch.cuda.memory_allocated()
        trainer.handover.to_trainer()
        held[str(offload)] = before, generating, torch.cuda.memory_allocated(), losses
        state = [*trainer.optimizer.masters().values(), *trainer.optimizer.moments().values()]
        buffers = sum(t.nbytes for t in trainer.optimizer.gradient_buffers().values())
        reference = sum(t.nbytes for t in trainer.policy.reference_weights().values())
        assert all(tensor.is_pinned() for tensor in state if tensor.ndim) == (offload != "none")
        del trainer
        gc.collect()
    (stays, *_, plain), (goes, generating, updating, found) = held.values()
    assert found == pytest.approx(plain, rel=1e-2)
    assert stays - goes >= 0.9 * sum(tensor.nbytes for tensor in state)
    assert generating <= goes - 0.9 * (buffers + reference) and updating >= goes
