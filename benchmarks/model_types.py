"""`python -m benchmarks models`: what each type of language model of the installed transformers does here.

A tiny random model of each is trained in float32 and held against transformers' own forward, one sequence at
a time: log-probabilities and gradients with shared prompts, what the transformers engine draws, LoRA and its
export, and the plan. A refusal is told in its own words.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from grpo_fast.config.policy import LoraConfig, ModelConfig
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.data.table import Completions
from grpo_fast.plan import Shapes, device_budget, plan
from grpo_fast.policy import Policy, load_policy, pack
from grpo_fast.policy.architecture import check_architecture
from grpo_fast.policy.recurrent import keep_step_limits
from grpo_fast.policy.vision import auto_class
from grpo_fast.rollout import Sampling, make_engine

from .measure import preload
from .models import make_samples, make_tokenizer
from .tiny import VOCABULARY, kinds, tiny_config, tiny_model
from .type_table import Measures, Row, TypeTable, fill, furthest, own_logprobs, words

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TABLE = TypeTable(
    "models",
    {
        "state": "batch",
        "logprobs": "Δ log p",  # nats, the largest difference
        "gradients": "Δ gradient",  # relative, of all parameters' together
        "computed": "computed",  # tokens that a layer computes, where 1 is each prompt once
        "rollout": "Δ rollout",  # nats
        "lora": "Δ LoRA",  # relative, of the exported model's logits
        "planned": "planned",
    },
    # Of rounding: Gemma 4's own gradient in float32 is 1.1e-5 from its own in float64, with some tokens more.
    {"logprobs": 2e-5, "gradients": 4e-5, "rollout": 1e-5, "lora": 1e-5},
    seconds=180,
)
# Tokens of a prompt and of a completion; three completions share a prompt.
LENGTHS = (*((19, n) for n in (9, 14, 5)), *((7, n) for n in (12, 1, 8)), *((31, n) for n in (20, 6, 6)))
OWN: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
PACKED, ROWS, REFUSED, NOT_BUILT = "packed", "rows", "refused", "not built"


def check(kind: str, seed: int = 0) -> Row:
    """Everything about one type, in this process."""
    row, config = TABLE.row(kind), None
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = tiny_config(kind)
            model = tiny_model(config, seed)
            model(torch.arange(3, 12)[None], use_cache=False)
            model.save_pretrained(folder)
            if type(model.config) is not type(config):  # the model is the text alone of it
                config.save_pretrained(folder)
            own = _loaded(config, folder)
        except Exception as error:
            return row | {"state": NOT_BUILT, "reasons": {"built": words(_refused(config) or error)}}
        make_tokenizer(VOCABULARY).save_pretrained(folder)
        settings = ModelConfig(path=folder, dtype="float32", device="cpu")
        try:
            policy = load_policy(settings)
        except Exception as error:
            return row | {"state": REFUSED, "reasons": {"loaded": words(error)}}
        table, _ = make_samples(LENGTHS, 3, VOCABULARY, seed)
        parts: dict[str, Measures] = {
            "logprobs": lambda: _trained(policy, own, table, seed),
            "rollout": lambda: {"rollout": _drawn(policy, own, table, seed)},
            "lora": lambda: {"lora": _adapted(settings, config, table, Path(folder) / "merged")},
            "planned": lambda: {"planned": _planned(settings, config)},
        }
        return fill(row | {"state": PACKED if policy.packs else ROWS}, parts)


def _refused(config: PreTrainedConfig | None) -> ValueError | None:
    """What is said of a configuration before anything is built."""
    try:
        if config is not None:
            check_architecture(config)
    except ValueError as error:
        return error
    return None


def _loaded(config: PreTrainedConfig, folder: str | Path) -> Any:
    """By transformers, but for the time steps of its Nemotron-H."""
    own = auto_class(config).from_pretrained(folder, **OWN).eval()
    keep_step_limits(own)
    return own


def _trained(policy: Policy, own: Any, table: Completions, seed: int) -> dict[str, float]:
    """Log-probabilities and gradients of a batch, and what its layers computed."""
    laid_out = partial(pack, table, max_tokens=10_000, device="cpu")
    (shared,), (batch,) = laid_out(), laid_out(shares_prompts=policy.packs)
    computed: Counter[str] = Counter()

    def count(name: str, _: object, given: tuple[Tensor], __: object) -> None:
        computed[name] += given[0].shape[:-1].numel()

    hooks = [
        module.register_forward_hook(partial(count, name))
        for name, module in policy.base_model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and "expert" not in name
    ]
    logprobs = policy.head.logits(policy.hidden_states(batch)).log_softmax(-1)
    for hook in hooks:
        hook.remove()
    found = logprobs.gather(1, batch.targets[:, None])[:, 0]
    sequences = [
        (table.prompt_of(row).tolist(), table.tokens_of(row).tolist()) for row in batch.rows.tolist()
    ]
    right = torch.cat([own_logprobs(own, *sequence) for sequence in sequences])
    weights = torch.randn(len(right), generator=torch.Generator().manual_seed(seed))
    for values in (found, right):
        (values * weights).sum().backward()
    expected = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    gradients = {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}
    if missing := expected.keys() ^ gradients.keys():
        raise ValueError(f"{min(missing)} has a gradient in one of both only")
    error = torch.stack([(gradients[name] - expected[name]).norm() for name in expected]).norm()
    return {
        "logprobs": float((found - right).detach().abs().max()),
        "gradients": float(error / torch.stack([part.norm() for part in expected.values()]).norm()),
        "computed": median(computed.values() or [0]) / len(shared.input_ids),
    }


def _drawn(policy: Policy, own: Any, table: Completions, seed: int) -> float:
    """What the transformers engine says of its completions."""
    prompts = [table.prompt_of(row).tolist() for row in (0, 3, 6)]
    with make_engine(RolloutConfig(engine="transformers"), policy, max_length=64) as engine:
        return furthest(own, prompts, engine.generate(prompts, 3, Sampling(12, seed=seed)))


def _adapted(settings: ModelConfig, config: PreTrainedConfig, table: Completions, folder: Path) -> float:
    """A step of LoRA on all linear layers, exported merged and loaded by transformers."""
    policy = load_policy(settings.model_copy(update={"lora": LoraConfig(r=4)}))
    (batch,) = pack(table, max_tokens=10_000, device="cpu", shares_prompts=policy.packs)
    policy.head.logits(policy.hidden_states(batch)).log_softmax(-1).square().mean().backward()
    used = [(p, p.grad) for p in policy.trainable().values() if p.grad is not None]
    if not any(gradient.any() for _, gradient in used):
        raise ValueError("no adapter has a gradient")
    ids = table.tokens_of(0)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with torch.no_grad():
        for parameter, _ in used:  # a step in any direction: half of the adapters begin at zero
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        trained = policy.model(**given).logits
        policy.save_pretrained(folder)
        exported = _loaded(config, folder)(**given).logits
    return float((exported - trained).norm() / trained.norm())


def _planned(settings: ModelConfig, config: PreTrainedConfig) -> bool:
    run = {
        "model": {"path": settings.path, "dtype": "bfloat16"},
        "dataset": {"source": "-", "max_prompt_length": 32},
        "rewards": [{"reward": "length"}],
        "rollout": {"engine": "transformers", "max_completion_length": 32},
    }
    shapes, device = Shapes(config), device_budget("80GiB")
    return plan(TrainConfig.model_validate(run), shapes, device).largest is not None


def summary(rows: Sequence[Row]) -> list[str]:
    """What is built, trains, is packed and refused, and the worst number of each column."""
    built = [row for row in rows if row["state"] != NOT_BUILT]
    trained = [row for row in built if row["gradients"] is not None]
    packed = sum(row["state"] == PACKED for row in trained)
    share = 100 * len(trained) / max(1, len(built))
    lines = [
        f"{len(rows)} types, of which transformers builds {len(built)}; {len(trained)} of these train "
        f"({share:.1f} %), {packed} packed and {len(trained) - packed} as rows"
    ]
    for column in TABLE.limits:
        if found := [(row[column], row["kind"]) for row in rows if row[column] is not None]:
            lines.append(f"worst {column}: {max(found)[0]:.1e}, of {max(found)[1]}; {len(found)} measured")
    return lines


add_arguments = TABLE.add_arguments


def main(options: argparse.Namespace) -> int:
    preload(__name__)
    rows = TABLE.measure(check, kinds(), options)
    print("", *summary(rows), sep="\n")
    return int(any(map(TABLE.wrong, rows)))
