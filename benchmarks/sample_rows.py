"""`python -m benchmarks rows`: a model's own rows, sampled on-policy at temperature 1.

The file holds `hidden` (M, H), the final hidden states that predict each sampled token, `target` (M,) int64,
`live_tiles` (M,) int32 and, unless left out, `weight` (V, H), the head, in the model's vocabulary order.
`head` takes it as `--real-rows`, and as `--histogram`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .live_tiles import PART_ROWS, THRESHOLD, Histogram, histogram_of, live_tiles
from .record import write_json

_QUESTION_FIELDS = ("prompt", "question", "problem")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a folder, a hub id, or package:NAME for a GGUF")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help=f"JSONL with one of {', '.join(_QUESTION_FIELDS)}")
    source.add_argument("--task", help="a task of reasoning-gym")
    parser.add_argument("--count", type=int, default=32, help="prompts (32)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a completion (256)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="safetensors")
    parser.add_argument("--no-head", action="store_true", help="leave `weight` out of the file")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="JSON of the live tiles per row")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: nothing to write, no prompts, or a head that is more than a product with its weight.
    """
    if options.out is None and options.histogram is None:
        raise ValueError("give --out FILE, --histogram FILE or both")
    prompts = read_prompts(options)
    name, model, tokenizer = load_model(options)
    weight = _plain_head(model)
    parts = list(_sampled_rows(model, tokenizer, prompts, options))
    hidden, targets = torch.cat([h for h, _ in parts]), torch.cat([t for _, t in parts])
    counts = live_tiles(hidden, weight.split(PART_ROWS))
    asked = f"{len(prompts)} prompts of {options.task or options.prompts.name}"
    source = f"{name}, {len(hidden)} tokens sampled at temperature 1 on {asked}"
    found = histogram_of(counts, source, weight.shape[0])
    if options.histogram is not None:
        write_json(options.histogram, found)
    if options.out is not None:
        _save(options.out, found, hidden, targets, counts, None if options.no_head else weight)
    print(f"{source}: {found.density:.2%} of the tiles hold a probability above {THRESHOLD:g}")
    return 0


def read_prompts(options: argparse.Namespace) -> list[str]:
    if options.task is not None:
        from grpo_fast.data.sources import import_reasoning_gym

        items = import_reasoning_gym().create_dataset(options.task, size=options.count, seed=options.seed)
        return [item["question"] for item in items]
    lines = [line for line in options.prompts.read_text().splitlines() if line.strip()][: options.count]
    if not lines:
        raise ValueError(f"--prompts {options.prompts} holds no lines")
    return [_question(json.loads(line), options.prompts, number) for number, line in enumerate(lines, 1)]


def _question(row: dict, path: Path, number: int) -> str:
    for name in _QUESTION_FIELDS:
        if isinstance(row.get(name), str):
            return row[name]
    raise ValueError(
        f"{path}, line {number}: no text under {', '.join(_QUESTION_FIELDS)}; it has {sorted(row)}"
    )


def load_model(options: argparse.Namespace) -> tuple[str, Any, Any]:
    """Its name, the model, the tokenizer. The name of a GGUF file says how its weights were rounded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_fast.policy.load import resolve_source

    source = resolve_source(options.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, options.dtype))
    return Path(source).name, model.eval().to(device), AutoTokenizer.from_pretrained(source)


def _plain_head(model: Any) -> Tensor:
    from grpo_fast.policy.architecture import head_parameters

    head = head_parameters(model)
    if head.bias is not None or head.logit_scale != 1.0 or head.softcap is not None:
        raise ValueError("this model biases, scales or caps its logits; such rows cannot be replayed")
    return head.weight.detach()


@torch.no_grad()
def _sampled_rows(
    model: Any, tokenizer: Any, prompts: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each prompt, (T, H) hidden states and (T,) the tokens sampled from them."""
    for ids, start in sampled(model, tokenizer, prompts, 1, max_tokens=options.max_tokens, seed=options.seed):
        yield model.base_model(input_ids=ids[None]).last_hidden_state[0, start - 1 : -1], ids[start:]


def sampled(
    model: Any, tokenizer: Any, prompts: Sequence[str], each: int, *, max_tokens: int, seed: int
) -> list[tuple[Tensor, int]]:
    """Of each prompt so many sequences, sampled at temperature 1: tokens, (L,), and the prompt's length."""
    from grpo_fast.rollout.transformers import TransformersEngine
    from grpo_fast.rollout.types import Sampling

    tokens = [_tokenised(tokenizer, prompt) for prompt in prompts]
    with TransformersEngine(model, tokenizer, eos_ids=_end_tokens(model, tokenizer)) as engine:
        groups = engine.generate(tokens, each, Sampling(max_tokens, temperature=1.0, seed=seed))
    return [
        (torch.tensor([*prompt, *completion.token_ids], device=model.device), len(prompt))
        for prompt, completions in zip(tokens, groups, strict=True)
        for completion in completions
    ]


def _tokenised(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in (*ids, tokenizer.eos_token_id) if token is not None}


def _save(
    path: Path, found: Histogram, hidden: Tensor, targets: Tensor, counts: Tensor, weight: Tensor | None
) -> None:
    from safetensors.torch import save_file

    tensors = {"hidden": hidden, "target": targets, "live_tiles": counts.int()}
    if weight is not None:
        tensors["weight"] = weight
    names = ("source", "vocabulary", "tile", "threshold")
    metadata = {name: str(getattr(found, name)) for name in names}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
