"""Choose how Triton's kernels run, correct its interpreter, and build toy models and runs.

Kernels run on the GPU where there is one, else interpreted. Triton reads TRITON_INTERPRET while it is
imported, so it is set here; the environment may override it. With `EMULATE=sm_90` Triton compiles for that
architecture, and `tests/emulator` executes the PTX.

The interpreter computes on bfloat16's bit patterns as integers, which is silently wrong, and truncates
float32. Its maximum keeps a NaN, where a GPU's takes the other number. A session-wide fixture corrects its
builder; `tests/kernels/test_interpreter.py` compares it with torch.
"""

from __future__ import annotations

import functools
import gc
import getpass
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import grpo_fast  # noqa: F401  before torch: it sets how OpenMP's threads wait

if "PYTEST_XDIST_WORKER" in os.environ:  # OpenMP's threads would spin on the other workers' cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from hypothesis import HealthCheck, settings

assert "triton" not in sys.modules, "Triton was imported before TRITON_INTERPRET was set"
EMULATED = os.environ.get("EMULATE", "")
os.environ.setdefault("TRITON_INTERPRET", "0" if EMULATED or torch.cuda.is_available() else "1")
# Separate caches, since torch would reuse code for other vector instructions (`ATEN_CPU_CAPABILITY`).
compiled = f"torchinductor_{getpass.getuser()}_{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / compiled))

# Scripts started by tests import this checkout.
checkout = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([checkout, *filter(None, [os.environ.get("PYTHONPATH")])])

gc.disable()  # until all tests are collected
INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
searched_modules = 0

# Tests must pass on a slow or busy machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select n random cases of each test marked `drawn(n)`; `SAMPLE=8` selects 8 tests."""
    dice = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # the same on all workers
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if INTERPRETED and item.get_closest_marker("drawn"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[pytest.Item] = set()
    for family in cases.values():
        (count,) = family[0].get_closest_marker("drawn").args
        left.update(dice.sample(family, max(0, len(family) - count)))
    if sample := int(os.environ.get("SAMPLE", 0)):
        left.update(dice.sample(items, max(0, len(items) - sample)))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Device of the kernels: the GPU, or the CPU under the interpreter or the emulator."""
    if not (INTERPRETED or EMULATED or torch.cuda.is_available()):
        pytest.skip("compiled kernels need a CUDA device: unset TRITON_INTERPRET to use the interpreter")
    return torch.device("cpu" if INTERPRETED or EMULATED else "cuda")


@pytest.fixture
def seed() -> int:
    """Fresh seed for every test, printed so that a failure can be repeated."""
    seed = int(torch.Generator().seed() % 2**31)
    print(f"seed {seed}")
    return seed


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def dice(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture(autouse=True)
def only_tests_of_the_report_draw_charts(request: pytest.FixtureRequest, monkeypatch: Any) -> None:
    """Skip the charts of every other test's runs: matplotlib takes about a second for a run's."""
    if request.path.name != "test_report.py":
        monkeypatch.setattr("grpo_fast.record.report.draw", lambda *_: "")


@pytest.fixture(scope="session")
def contents() -> Callable[[Any], dict[str, torch.Tensor]]:
    """Read all tensors of a checkpoint."""

    def read(checkpoint: Any) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty_like(like, device="cpu") for name, like in checkpoint.tensors.items()}
        checkpoint.load(tensors)
        return tensors

    return read


@pytest.fixture
def garbage_in_new_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN and huge integers.

    On a CPU torch fills what `torch.empty` returns. On a GPU that mode would choose other algorithms, so the
    memory that its allocator reuses is filled instead.
    """
    if torch.cuda.is_available() and not INTERPRETED:
        sizes = (1 << 26, *[1 << 17] * 32)  # the allocator's large and small blocks
        filled = [torch.full((size,), torch.nan, device="cuda") for size in sizes]
        del filled
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def libraries_are_not_searched_for_garbage() -> None:
    """Freeze imported libraries, so that a garbage collection does not take up to a second."""
    global searched_modules
    if len(sys.modules) > searched_modules + 50:
        searched_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def compiled_kernels_run_in_the_emulator() -> Iterator[None]:
    """With `EMULATE=sm_90`, run every launch of a test on the PTX of that architecture."""
    if not EMULATED:
        yield
        return
    from tests.emulator.launch import emulated

    with emulated(EMULATED):
        yield


@pytest.fixture(autouse=True, scope="session")
def arithmetic_of_a_gpu_in_the_interpreter() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    semantic = pytest.importorskip("triton.language.semantic")
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        _correct_bf16(interpreter, patch)
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "create_maxnumf", lambda self, *pair: self.binary_op(*pair, np.fmax))
        patch.setattr(builder, "create_minnumf", lambda self, *pair: self.binary_op(*pair, np.fmin))
        patch.setattr(builder, "create_splat", _splat)
        _patch_the_language_once_a_launch(interpreter, patch)
        # It prepares an assertion that is never made, which takes a third of a kernel's time.
        patch.setattr(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
        of_scalar = functools.cache(interpreter._get_np_dtype)
        patch.setattr(
            interpreter,
            "_get_np_dtype",
            lambda kind: np.dtype(np.uint64) if kind.scalar.is_ptr() else of_scalar(kind.scalar),
        )
        yield


def _patch_the_language_once_a_launch(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Patch once per launch; Triton patches at every call of a device function, half of a kernel's time."""
    import triton.language as tl

    launch, patch_language = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[frozenset[str]] = set()

    @functools.cache
    def modules(function: Any) -> frozenset[str]:
        return frozenset(
            value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core
        )

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *arguments, **options)

    def patched_once(function: Any) -> Any:
        if modules(function) in patched:
            return None
        patched.add(modules(function))
        return patch_language(function)

    patch.setattr(interpreter.GridExecutor, "__call__", launched)
    patch.setattr(interpreter, "_patch_lang", patched_once)


def _splat(builder: Any, kind: Any, scalar: Any) -> Any:
    """Keep a comparison's booleans, as Triton 3.9 demands of a mask."""
    return type(scalar)(np.full(kind.shape, scalar.data, dtype=scalar.data.dtype), scalar.dtype.scalar)


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even, and keep NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (
        np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(np.shape(values))
    )


def _correct_bf16(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Let the builder's arithmetic read bfloat16 as float32, and round the results."""
    import triton.language as tl

    builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def is_bf16(handle: Any) -> bool:
        return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16

    def widen(handle: Any) -> Any:
        return Handle(bf16_to_float32(handle.data), tl.float32) if is_bf16(handle) else handle

    def narrow(handle: Any) -> Any:
        # A comparison returns booleans under the operands' type.
        data = handle.data
        return Handle(float32_to_bf16(data) if data.dtype.kind == "f" else data, tl.bfloat16)

    def rounding(method: Callable[..., Any]) -> Callable[..., Any]:
        def corrected(self: Any, *operands: Any) -> Any:
            if not any(map(is_bf16, operands)):
                return method(self, *operands)
            return narrow(method(self, *map(widen, operands)))

        return corrected

    def cast(method: Callable[..., Any]) -> Callable[..., Any]:
        def corrected(self: Any, source: Any, destination: Any, *rest: Any) -> Any:
            target = destination.scalar
            if is_bf16(source) and target == tl.bfloat16:
                return source
            if target == tl.bfloat16:
                return narrow(Handle(source.data.astype(np.float32), tl.float32))
            if not is_bf16(source):
                return method(self, source, destination, *rest)
            return Handle(bf16_to_float32(source.data).astype(interpreter._get_np_dtype(target)), target)

        return corrected

    def dot(method: Callable[..., Any]) -> Callable[..., Any]:
        def corrected(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
            result = method(self, widen(a), widen(b), widen(accumulator), *rest)
            return narrow(result) if is_bf16(accumulator) else result

        return corrected

    def refuse(method: Callable[..., Any]) -> Callable[..., Any]:
        def corrected(self: Any, operands: Any) -> Any:
            if any(is_bf16(operand.handle) for operand in operands):
                raise NotImplementedError(
                    "bfloat16 reductions and scans: cast to float32 in the kernel first"
                )
            return method(self, operands)

        return corrected

    def constant(self: Any, value: float) -> Any:
        return narrow(Handle(np.array([value], dtype=np.float32), tl.float32))

    for name in ("binary_op", "ternary_op", "unary_op", "create_fma", "create_rsqrt"):
        patch.setattr(builder, name, rounding(getattr(builder, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        patch.setattr(builder, name, cast(getattr(builder, name)))
    patch.setattr(builder, "create_dot", dot(builder.create_dot))
    patch.setattr(builder, "get_bf16", constant, raising=False)
    reductions = interpreter.ReduceScanOpInterface
    patch.setattr(reductions, "check_tensor", refuse(reductions.check_tensor))


def word_tokenizer(words: list[str], end: str) -> Any:
    """Return a tokenizer of these words, separated by spaces; the first stands for all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], eos_token=end)


def save_llama(folder: Path, tokenizer: Any, **changes: Any) -> None:
    """Write a tokenizer and a random model, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**{**sizes, **tokens, **changes})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of TrainConfig for a run in seconds: a random model, rewarded for words near `w7`."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = word_tokenizer(["<unk>", "</s>", *(f"w{i}" for i in range(2, 24))], "</s>")
    save_llama(folder / "model", tokenizer, num_key_value_heads=2, tie_word_embeddings=True)
    prompts = [{"prompt": f"w{2 + i % 11} w{13 + i % 11} w{2 + (5 * i) % 22}"} for i in range(32)]
    held_out = [{"prompt": f"w{2 + i} w{13 + i} w3 w4"} for i in range(10)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    (folder / "rewards.py").write_text(
        "def near_w7(completions, **columns):\n"
        "    numbers = [[int(word[1:]) for word in text.split()] for text in completions]\n"
        "    return [sum(1 / (1 + abs(n - 7)) for n in row) / max(1, len(row)) for row in numbers]\n"
    )
    return {
        "max_steps": 6,
        "prompts_per_step": 4,
        "micro_batch_tokens": 64,
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "dataset": {"source": str(folder / "prompts.jsonl")},
        "rewards": [{"reward": f"{folder / 'rewards.py'}:near_w7"}],
        "rollout": {"num_generations": 6, "max_completion_length": 8},
        "optimizer": {"learning_rate": 3e-3},
        "evaluation": {"dataset": {"source": str(folder / "held_out.jsonl")}, "threshold": 0.5},
        "logging": {"tensorboard": False},
    }


TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] -%}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
CALL = '<tool_call>{{"name": "guess", "arguments": {{"number": {}}}}}</tool_call>'


@pytest.fixture(scope="session")
def playing_toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a random model that calls tools, since a call is one token of its vocabulary."""
    from tokenizers import AddedToken

    folder, own = tmp_path_factory.mktemp("playing"), Path(__file__).parent / "environments" / "guess.py"
    fast = word_tokenizer(["<unk>", "guess", "w1", "w2", "w3", "w4"], "<end>")
    fast.add_tokens([AddedToken(text, special=True) for text in ("<user>", "<assistant>", "<tool>")])
    fast.add_tokens([AddedToken(CALL.format(i), normalized=False) for i in range(1, 9)])
    fast.chat_template = TEMPLATE
    save_llama(folder / "model", fast)
    rows = [{"prompt": f"w{1 + i % 4} w{1 + i % 3}", "start": i % 5} for i in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "held_out.jsonl").write_text("\n".join(json.dumps(row | {"start": 7}) for row in rows[:4]))
    return {
        "max_steps": 2,
        "prompts_per_step": 2,
        "threads": 1,
        "micro_batch_tokens": 256,
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "dataset": {"source": str(folder / "rows.jsonl")},
        "rewards": [{"reward": f"{own}:patience"}],
        "rollout": {
            "environment": f"{own}:Guess",
            "num_generations": 4,
            "max_completion_length": 32,
            "max_turns": 4,
        },
        "evaluation": {"dataset": {"source": str(folder / "held_out.jsonl")}, "reward": "Guess", "every": 1},
        "logging": {"tensorboard": False, "samples_every": 1},
    }


@pytest.fixture
def make_trainer(toy: dict[str, Any]) -> Callable[..., Any]:
    """Build the toy's trainer; sections are merged into the toy's."""
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.run import build_trainer

    def make(**sections: Any) -> Any:
        merged = {
            name: {**toy.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in sections.items()
        }
        return build_trainer(TrainConfig(**{**toy, **merged}))

    return make
