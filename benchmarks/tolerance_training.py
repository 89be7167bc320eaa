"""`python -m benchmarks.tolerance_training`: what leaving out does to a training run.

A toy that learns to sort five digits is trained by GRPO from the same warm start with the certified backward
(`tolerance` default), the exact one (0) and full logits; the final rewards are set beside the spread over
seeds. The cosine of whole-model gradients, certified against full logits, is taken on the way and, with
`--model`, on one batch of a real model's own samples. On a CPU the head leaves out what its kernels would.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast import linear_logprob
from grpo_fast.head.plan import DEFAULT_TOLERANCE
from grpo_fast.run_record.logs import provenance

from .record import write_json

VOCABULARY, STRIDE = 2048, 128  # 16 tiles; each of the task's symbols lies in one of its own
DIGITS, LENGTH = 10, 5
ARROW, END = STRIDE * DIGITS, STRIDE * (DIGITS + 1)
PROMPTS, GROUP, WARM_STEPS, WARM_BATCH = 16, 8, 150, 128
Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden (N, H), weight (V, H), targets (N,)) -> (N,)."""


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def head(tolerance: float) -> Logprobs:
    return lambda *problem: linear_logprob(*problem, tolerance=tolerance).logprob


FULL, EXACT, CERTIFIED = "full logits", "tolerance 0", f"tolerance {DEFAULT_TOLERANCE:g}"
VARIANTS = {FULL: full_logits, EXACT: head(0.0), CERTIFIED: head(DEFAULT_TOLERANCE)}


def make_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_prompts(count: int, rng: torch.Generator) -> Tensor:
    """(count, LENGTH + 1) digits and an arrow."""
    digits = torch.randint(0, DIGITS, (count, LENGTH), generator=rng) * STRIDE
    return torch.cat([digits, torch.full((count, 1), ARROW)], 1)


def answers(prompts: Tensor) -> Tensor:
    """(count, LENGTH + 1) what should follow, the end with it."""
    ordered = prompts[:, :LENGTH].sort(1).values
    return torch.cat([ordered, torch.full((len(prompts), 1), END)], 1)


def completion_logprobs(model: Any, tokens: Tensor, logprobs: Logprobs) -> Tensor:
    """(count, LENGTH + 1) log-probabilities of what follows the prompt."""
    hidden = model.model(input_ids=tokens).last_hidden_state[:, LENGTH:-1]
    targets = tokens[:, LENGTH + 1 :]
    flat = logprobs(hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight, targets.reshape(-1))
    return flat.view(targets.shape)


def warm_start(model: Any, rng: torch.Generator) -> None:
    """Supervised, on demonstrations of which a third are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(WARM_STEPS):
        prompts = make_prompts(WARM_BATCH, rng)
        shown = answers(prompts)
        wrong = torch.rand(WARM_BATCH, generator=rng) > 1 / 3
        shuffled = torch.rand(WARM_BATCH, LENGTH, generator=rng).argsort(1)
        shown[:, :LENGTH] = torch.where(
            wrong[:, None], prompts[:, :LENGTH].gather(1, shuffled), shown[:, :LENGTH]
        )
        loss = -completion_logprobs(model, torch.cat([prompts, shown], 1), full_logits).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def sample(model: Any, prompts: Tensor, rng: torch.Generator) -> Tensor:
    """Prompts with LENGTH + 1 tokens sampled at temperature 1."""
    tokens = prompts
    for _ in range(LENGTH + 1):
        hidden = model.model(input_ids=tokens).last_hidden_state[:, -1]
        p = (hidden @ model.lm_head.weight.T).float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=rng)], 1)
    return tokens


def rewards_of(tokens: Tensor) -> Tensor:
    """1 where all that follows the prompt is right."""
    return (tokens[:, LENGTH + 1 :] == answers(tokens[:, : LENGTH + 1])).all(1).float()


def policy_loss(logprobs: Tensor, tokens: Tensor, rewards: Tensor) -> Tensor:
    """GRPO, one update per sample: the ratio is one and its gradient the log-probability's."""
    groups = rewards.view(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    mask = (tokens[:, LENGTH + 1 :] == END).cumsum(1) - (tokens[:, LENGTH + 1 :] == END).int() == 0
    return -((logprobs - logprobs.detach()).exp() * advantages.view(-1, 1) * mask).sum() / mask.sum()


def gradient(model: Any, loss: Tensor) -> Tensor:
    """All parameters' gradients in one vector."""
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return torch.cat([g.flatten().float() for g in found])


def difference(model: Any, loss: Callable[[Logprobs], Tensor]) -> dict[str, float] | None:
    """Of the whole-model gradients with the certified backward and with full logits; None if that is zero."""
    exact = gradient(model, loss(full_logits)).double()
    if not exact.any():
        return None
    certified = gradient(model, loss(VARIANTS[CERTIFIED])).double()
    cosine = torch.nn.functional.cosine_similarity(exact, certified, dim=0)
    return {
        "one_minus_cosine": 1 - cosine.item(),
        "relative": ((exact - certified).norm() / exact.norm()).item(),
    }


def train(model: Any, logprobs: Logprobs, steps: int, seed: int) -> dict[str, Any]:
    """Mean rewards of every step, and gradient differences at the run's start, middle and end."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0)
    history, differences = [], {}
    for step in range(steps):
        tokens = sample(model, make_prompts(PROMPTS, rng).repeat_interleave(GROUP, 0), rng)
        rewards = rewards_of(tokens)

        def loss(of: Logprobs, tokens: Tensor = tokens, rewards: Tensor = rewards) -> Tensor:
            return policy_loss(completion_logprobs(model, tokens, of), tokens, rewards)

        if step in (0, steps // 2, steps - 1):
            differences[step] = difference(model, loss)
        optimizer.zero_grad()
        loss(logprobs).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(rewards.mean().item())
    return {"rewards": history, "gradient": differences, "final": statistics.mean(history[-10:])}


def train_all(seed: int, steps: int) -> dict[str, dict[str, Any]]:
    """Every variant from the same warm start, on the same prompts."""
    torch.manual_seed(seed)
    start = make_model()
    warm_start(start, torch.Generator().manual_seed(seed))
    runs = {}
    for name, logprobs in VARIANTS.items():
        began = time.monotonic()
        runs[name] = train(copy.deepcopy(start), logprobs, steps, seed)
        seconds = time.monotonic() - began
        print(f"seed {seed}, {name}: {runs[name]['final']:.3f}, {seconds:.0f} s", flush=True)
    return runs


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each variant the mean final reward over the seeds, its standard deviation, and the seeds' range."""
    finals = {name: [run["final"] for run in of_seeds] for name, of_seeds in runs.items()}
    return {
        name: {
            "mean": statistics.mean(final),
            "deviation": statistics.stdev(final) if len(final) > 1 else 0.0,
            "low": min(final),
            "high": max(final),
        }
        for name, final in finals.items()
    }


def real_model(path: str, count: int, group: int, seed: int) -> dict[str, Any]:
    """Gradient difference on one batch of a model's own samples, with advantages drawn at random.

    All of the model's weights take part, its tied head too.
    """
    from .sample_rows import load_model, read_prompts, sampled

    options = argparse.Namespace(model=path, dtype="float32", task="chain_sum", count=count, seed=seed)
    name, model, tokenizer = load_model(options)
    prompts = read_prompts(options)
    sequences = sampled(model, tokenizer, prompts, group, max_tokens=24, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    advantages = torch.cat(
        [torch.randn(1, generator=rng).expand(len(ids) - start) for ids, start in sequences]
    ).to(model.device)
    targets = torch.cat([ids[start:] for ids, start in sequences])

    def loss(of: Logprobs) -> Tensor:
        states = (model.base_model(input_ids=ids[None]).last_hidden_state[0] for ids, _ in sequences)
        hidden = torch.cat([rows[start - 1 : -1] for rows, (_, start) in zip(states, sequences, strict=True)])
        return -(of(hidden, model.get_output_embeddings().weight, targets) * advantages).mean()

    return {"model": name, "tokens": len(targets), "float32": difference(model, loss)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tolerance_training", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="0: only the real model (3)")
    parser.add_argument("--steps", type=int, default=100, help="of the toy (100)")
    parser.add_argument(
        "--model", help="also one batch of it: a folder, a hub id, or package:NAME for a GGUF"
    )
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"environment": provenance(), "vocabulary": VOCABULARY, "steps": options.steps}
    if options.model:
        found["real_model"] = real_model(options.model, count=2, group=6, seed=0)
        print(found["real_model"], flush=True)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for seed in range(options.seeds):
        for variant, run in train_all(seed, options.steps).items():
            runs[variant].append(run)
        found |= {"summary": summary(runs), "runs": runs}
        if options.json is not None:
            write_json(options.json, found)
    if options.json is not None:
        write_json(options.json, found)
    for variant, of in found.get("summary", {}).items():
        print(f"{variant:<12} {of['mean']:.3f} ± {of['deviation']:.3f}, {of['low']:.3f} to {of['high']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
