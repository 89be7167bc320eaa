"""`python -m benchmarks rows`: a model's own rows, sampled on-policy at temperature 1.

The file holds `hidden` (M, H), the final hidden states that predict each sampled token, `target` (M,) int64,
`live_tiles` (M,) int32 and, unless left out, `weight` (V, H), the head, in the model's vocabulary order.
`head` takes it as `--real-rows`, and as `--histogram`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from .live_tiles import PART_ROWS, THRESHOLD, histogram_of, live_tiles
from .record import write_json

_COLUMNS = ("prompt", "question", "problem")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a folder, a hub id, or package:NAME for a GGUF")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help=f"JSONL with one of {', '.join(_COLUMNS)}")
    source.add_argument("--task", help="a task of reasoning-gym")
    parser.add_argument("--count", type=int, default=32, help="prompts (32)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a completion (256)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="safetensors")
    parser.add_argument("--no-head", action="store_true", help="leave `weight` out of the file")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="JSON of the live tiles per row")


@torch.no_grad()
def main(options: argparse.Namespace) -> int:
    from safetensors.torch import save_file

    from grpo_fast.data import load_prompts
    from grpo_fast.data.config import DatasetConfig
    from grpo_fast.policy import Sample, load_policy, pack
    from grpo_fast.policy.config import ModelConfig
    from grpo_fast.policy.load import resolve_source
    from grpo_fast.rollout import Sampling
    from grpo_fast.rollout.transformers import TransformersEngine

    if options.out is None and options.histogram is None:
        raise ValueError("give --out FILE, --histogram FILE or both")
    asked = DatasetConfig(source=f"reasoning_gym:{options.task}", size=options.count, seed=options.seed)
    if options.prompts is not None:
        asked = DatasetConfig(source=str(options.prompts), prompt_column=_column(options.prompts))
    policy = load_policy(ModelConfig(path=options.model, dtype=options.dtype))
    head = policy.head
    if head.bias is not None or head.logit_scale != 1.0 or head.softcap is not None:
        raise ValueError("this model biases, scales or caps its logits; such rows cannot be replayed")
    prompts = [prompt.token_ids for prompt in load_prompts(asked, policy.tokenizer)[: options.count]]
    with TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids) as engine:
        groups = engine.generate(prompts, 1, Sampling(options.max_tokens, temperature=1.0, seed=options.seed))
    rows, targets = [], []
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        sample = Sample(prompt, completion.token_ids, 0.0, 0, completion.logprobs)
        size = len(prompt) + len(completion.token_ids)
        (batch,) = pack([sample], max_tokens=size, device=policy.device)
        rows.append(policy.hidden_states(batch))
        targets.append(batch.targets)
    hidden, weight = torch.cat(rows), head.weight
    counts = live_tiles(hidden, weight.split(PART_ROWS))
    name = Path(resolve_source(options.model)).name  # of a GGUF file: it says how its weights were rounded
    of_prompts = f"{len(prompts)} prompts of {options.task or options.prompts.name}"
    about = f"{name}, {len(hidden)} tokens sampled at temperature 1 on {of_prompts}"
    found = histogram_of(counts, about, len(weight))
    if options.histogram is not None:
        write_json(options.histogram, found)
    if options.out is not None:
        tensors = {"hidden": hidden, "target": torch.cat(targets), "live_tiles": counts.int()}
        tensors |= {} if options.no_head else {"weight": weight}
        metadata = {key: str(getattr(found, key)) for key in ("source", "vocabulary", "tile", "threshold")}
        save_file({key: of.cpu().contiguous() for key, of in tensors.items()}, options.out, metadata)
    print(f"{about}: {found.density:.2%} of the tiles hold a probability above {THRESHOLD:g}")
    return 0


def _column(path: Path) -> str:
    """Where the prompts stand in a file of JSON lines."""
    with path.open() as file:
        row = json.loads(file.readline() or "{}")
    found = next((name for name in _COLUMNS if name in row), None)
    if found is None:
        raise ValueError(f"{path}, line 1: no text under {', '.join(_COLUMNS)}; it has {sorted(row)}")
    return found
