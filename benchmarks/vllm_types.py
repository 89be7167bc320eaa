"""`python -m benchmarks vllm`: what vLLM draws from each type of model, against the policy's own forward.

A tiny random model of each in float32, wide enough for vLLM's kernels on a CPU: at the start, after a sync
of all weights, after one of LoRA merged, and from its export, which vLLM loads by itself. A refusal is told
in its own words.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_fast.policy import Policy, load_policy
from grpo_fast.policy.architecture import rounding_nats
from grpo_fast.policy.config import LoraConfig, ModelConfig
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.config import VLLMConfig
from grpo_fast.rollout.vllm import installed_version

from .machine import environment
from .model_types import in_a_process, words
from .models import make_tokenizer
from .record import write_json
from .tables import DASH, console
from .tiny import VOCABULARY, tiny_config, tiny_model

RECORD = Path(__file__).resolve().parent / "results" / "vllm_types.json"
KINDS = (
    *("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "granitemoe", "glm4_moe", "ernie4_5_moe", "minimax_m2"),
    *("gpt_oss", "phimoe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2"),
)
_CHOSEN = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1}
_YARN: dict[str, Any] = {
    "head_dim": 64,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    },
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 32},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "lm_head_bias": True},
    "deepseek_v2": _YARN,
    "deepseek_v3": _CHOSEN | _YARN,
    "glm4_moe_lite": _CHOSEN | {"head_dim": 64},
    "lfm2": {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128},
}
"""What vLLM reads of the published configurations, and transformers leaves out of its own."""
COLUMNS = ("start", "synced", "merged", "exported")
WAYS = {"portable": "reloaded", "direct": "copied"}
PROMPTS = ((5, 6, 7), (8, 9, 10, 11, 12), tuple(3 + i % 26 for i in range(70)))
SAMPLING = Sampling(max_completion_length=20, seed=11)
SECONDS = 600  # that one type may take
Drawn = tuple[Sequence[int], Sequence[float]]  # tokens and their log-probabilities
STEP = 0.02  # of what a weight is shaken by


@dataclass(frozen=True)
class Row:
    """Of all completions the nats of the token furthest apart; None: not measured, for one of the reasons."""

    kind: str
    way: str | None = None  # that all weights take
    start: float | None = None
    synced: float | None = None
    merged: float | None = None
    exported: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)  # by column

    @property
    def wrong(self) -> list[str]:
        """The columns with numbers that rounding does not explain."""
        found = {column: getattr(self, column) for column in COLUMNS}
        limit = rounding_nats(torch.float32, "cpu")
        return [column for column, nats in found.items() if nats is not None and not nats <= limit]


def check(kind: str, seed: int = 0, parts: Sequence[str] = ("start", "merged", "exported")) -> Row:
    """One type, in this process, in which vLLM starts once for each part; `start` measures a sync, too."""
    row = Row(kind)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _save(kind, folder, seed)
            make_tokenizer(VOCABULARY).save_pretrained(folder)
        except Exception as error:
            return replace(row, reasons={"built": words(error)})
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "start": lambda: _trained(folder),
            "merged": lambda: {"merged": _adapted(folder)},
            "exported": lambda: {"exported": _served(folder)},
        }
        for column in parts:
            try:
                row = replace(row, **measures[column]())
            except Exception as error:
                row = replace(row, reasons={**row.reasons, column: words(error)})
    return row


def _save(kind: str, folder: str, seed: int) -> None:
    published = PUBLISHED.get(kind, {})
    config = tiny_config(kind, wide=True)
    config.update(published)
    tiny_model(config, seed).save_pretrained(folder)
    config.update(published)  # which had transformers' name of the architecture
    config.save_pretrained(folder)


def _policy(folder: str, **settings: Any) -> Policy:
    return load_policy(ModelConfig(path=folder, dtype="float32", device="cpu", **settings))


def _engine(policy: Policy) -> Any:
    from grpo_fast.rollout.vllm.engine import VLLMEngine

    return VLLMEngine(policy, VLLMConfig(kv_cache_gib=0.05), max_length=128)


def _drawn(engine: Any) -> list[list[Drawn]]:
    groups = engine.generate(PROMPTS, 3, SAMPLING)
    return [[(one.token_ids, one.logprobs) for one in group] for group in groups]


@torch.no_grad()
def _shake(policy: Policy, scale: float) -> None:
    """A step in any direction."""
    for parameter in policy.trainable().values():
        parameter.add_(torch.randn_like(parameter), alpha=scale)


def _trained(folder: str) -> dict[str, Any]:
    policy = _policy(folder)
    with _engine(policy) as engine:
        start = _apart(policy, _drawn(engine))
        _shake(policy, STEP)
        engine.sync(policy)
        return {"way": engine._sync.way, "start": start, "synced": _apart(policy, _drawn(engine))}


def _adapted(folder: str) -> float:
    policy = _policy(folder, lora=LoraConfig(r=4))
    with _engine(policy) as engine:
        _shake(policy, 5 * STEP)
        engine.sync(policy)
        return _apart(policy, _drawn(engine))


def _served(folder: str) -> float:
    """An export with LoRA merged, by a vLLM that knows the folder alone."""
    from grpo_fast.rollout.vllm.start import starting, stopped

    policy = _policy(folder, lora=LoraConfig(r=4))
    _shake(policy, 5 * STEP)
    policy.save_pretrained(f"{folder}/merged")
    with starting():
        from vllm import LLM, SamplingParams

        sizes = {"max_model_len": 128, "kv_cache_memory_bytes": 50 << 20}
        served = LLM(f"{folder}/merged", dtype="float32", enforce_eager=True, **sizes)
        wanted = SamplingParams(n=3, max_tokens=20, logprobs=0, seed=11, flat_logprobs=True)
        found = served.generate([{"prompt_token_ids": [*prompt]} for prompt in PROMPTS], wanted)
    served.llm_engine.engine_core.shutdown()
    stopped()
    return _apart(policy, [[(o.token_ids, o.logprobs.logprobs) for o in one.outputs] for one in found])


@torch.no_grad()
def _apart(policy: Policy, groups: Sequence[Sequence[Drawn]]) -> float:
    differences = []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for tokens, logprobs in group:
            ids = torch.tensor([[*prompt, *tokens]])
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            own = logits.float().log_softmax(-1).gather(1, torch.tensor([*tokens])[:, None])[:, 0]
            differences.append(own - torch.tensor([*logprobs]))
    return float(torch.cat(differences).abs().max())


HEADS = ("type", "weights", "at the start", "after a sync", "LoRA merged", "exported", "reasons")


def cells(row: Row) -> list[str]:
    """One line of the table; numbers that are wrong are bold."""

    def number(column: str) -> str:
        value = getattr(row, column)
        shown = DASH if value is None else f"{value:.0e}"
        return f"**{shown}**" if column in row.wrong else shown

    told: dict[str, list[str]] = {}
    for column, why in row.reasons.items():
        told.setdefault(why, []).append(column)
    reasons = "; ".join(f"{', '.join(columns)}: {why}" for why, columns in told.items()).replace("|", "\\|")
    return [
        row.kind,
        WAYS.get(row.way or "", row.way or DASH),
        *map(number, COLUMNS),
        reasons,
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="TYPE", default=KINDS, help="these types (all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights (%(default)s)")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} of benchmarks/results")


def _ended(kind: str, why: str) -> Row:
    return Row(kind, reasons={"start": why})


def main(options: argparse.Namespace) -> int:
    screen, rows = console(), recorded()
    for kind in options.only:
        for row in in_a_process([kind], partial(check, seed=options.seed), _ended, SECONDS):
            rows[kind] = row
            screen.print("  ".join(cell for cell in cells(row) if cell != DASH), markup=False, soft_wrap=True)
    if options.record:
        document = {"vllm_types": [asdict(rows[kind]) for kind in KINDS if kind in rows]}
        about = {"vllm": installed_version(), "environment": environment(torch.device("cpu"))}
        write_json(RECORD, document | about)
    return int(any(rows[kind].wrong for kind in options.only))


def recorded() -> dict[str, Row]:
    """The rows of the checked-in record."""
    if not RECORD.exists():
        return {}
    found = json.loads(RECORD.read_text(encoding="utf-8"))["vllm_types"]
    return {row["kind"]: Row(**row) for row in found}


def as_table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Heads and rows, of a record's rows."""
    return {"heads": HEADS, "rows": [cells(Row(**row)) for row in rows]}
