"""How many vocabulary tiles of a row matter: counting them, and histograms of the counts.

`python -m benchmarks rows` samples a model's own rows, on-policy at temperature 1. Its file holds `hidden`
(M, H), the final hidden states that predict each sampled token, `target` (M,) int64, `live_tiles` (M,) int64
and `weight` (V, H), the head, in the model's vocabulary order.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn.functional import pad

from .record import write_json

TILE = 128
HISTOGRAM = Path(__file__).parent / "results" / "live_tiles_qwen2.5_coder_1.5b.json"
THRESHOLD = 1e-5  # a tile is live when one of its probabilities is larger


@dataclass(frozen=True)
class Histogram:
    """Rows by their number of live tiles, and where they come from."""

    source: str  # the model and how its rows were sampled
    vocabulary: int
    rows_by_live_tiles: dict[int, int]
    tile: int = TILE
    threshold: float = THRESHOLD

    @property
    def tiles(self) -> int:
        return -(-self.vocabulary // self.tile)

    @property
    def density(self) -> float:
        rows = sum(self.rows_by_live_tiles.values())
        return sum(k * n for k, n in self.rows_by_live_tiles.items()) / (rows * self.tiles)

    def draw(self, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
        """(rows,) int64 counts of live tiles; another vocabulary keeps the share of tiles."""
        counts = torch.tensor(list(self.rows_by_live_tiles), dtype=torch.float64)
        weights = torch.tensor(list(self.rows_by_live_tiles.values()), dtype=torch.float64)
        drawn = counts[torch.multinomial(weights, rows, replacement=True, generator=generator)]
        return (drawn * -(-vocabulary // self.tile) / self.tiles).round().clamp(min=1).long()


def load_histogram(path: Path) -> Histogram:
    """
    Raises:
        ValueError: not a file that `python -m benchmarks rows --histogram` wrote.
    """
    try:
        found = TypeAdapter(Histogram).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is no histogram ({error}); `python -m benchmarks rows` writes them"
        ) from error
    if (found.tile, found.threshold) != (TILE, THRESHOLD) or not found.rows_by_live_tiles:
        raise ValueError(
            f"{path} counts tiles of {found.tile} above {found.threshold}; this needs {TILE} and "
            f"{THRESHOLD}, and at least one row"
        )
    return found


def given_histogram(path: Path | None, device: torch.device) -> Histogram | None:
    """The one asked for; on a GPU that of Qwen2.5-Coder-1.5B unless given."""
    if path is None and device.type == "cuda":
        path = HISTOGRAM
    return None if path is None else load_histogram(path)


def count_live(logits: Tensor) -> Tensor:
    """(n, V) float32 -> (n,) int64: tiles with a probability above THRESHOLD."""
    padded = pad(logits, (0, -logits.shape[1] % TILE), value=-math.inf)
    highest = padded.view(len(logits), -1, TILE).amax(2)
    return (highest > logits.logsumexp(1, keepdim=True) + math.log(THRESHOLD)).sum(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a folder, a hub id, or package:NAME for a GGUF")
    parser.add_argument("--dataset", required=True, metavar="SOURCE", help="as `dataset.source` takes it")
    parser.add_argument("--prompt-column", default="prompt", help="of a file or a hub dataset (prompt)")
    parser.add_argument("--count", type=int, default=32, help="prompts (32)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a completion (256)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="safetensors of the rows")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="JSON of the live tiles per row")


@torch.no_grad()
def main(options: argparse.Namespace) -> int:
    from safetensors.torch import save_file

    from grpo_fast.config.data import DatasetConfig
    from grpo_fast.config.policy import ModelConfig
    from grpo_fast.data import load_prompts
    from grpo_fast.data.table import CompletionTable
    from grpo_fast.policy import load_policy, pack
    from grpo_fast.policy.source import resolve_source
    from grpo_fast.rollout import Sampling
    from grpo_fast.rollout.transformers import TransformersEngine

    policy = load_policy(ModelConfig(path=options.model, dtype=options.dtype))
    head = policy.head
    if head.bias is not None or head.logit_scale != 1.0 or head.softcap is not None:
        raise ValueError("this model biases, scales or caps its logits; such rows cannot be replayed")
    asked = DatasetConfig(source=options.dataset, prompt_column=options.prompt_column, size=options.count)
    prompts = [prompt.token_ids for prompt in load_prompts(asked, policy.tokenizer)]
    with TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids) as engine:
        groups = engine.generate(prompts, 1, Sampling(options.max_tokens, temperature=1.0, seed=options.seed))
    samples = CompletionTable.of(prompts, [completion.token_ids for (completion,) in groups])
    batches = pack(samples, max_tokens=8192, device=policy.device)
    hidden = torch.cat([policy.hidden_states(batch) for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    weight = head.weight.float()
    counts = torch.cat([count_live(part.float() @ weight.T) for part in hidden.split(64)])
    name = Path(resolve_source(options.model)).name  # of a GGUF file: it says how its weights were rounded
    of_prompts = f"{len(prompts)} prompts of {Path(options.dataset).name}"
    about = f"{name}, {len(hidden)} tokens sampled at temperature 1 on {of_prompts}"
    found = Histogram(about, len(weight), dict(sorted(Counter(counts.tolist()).items())))
    write_json(options.histogram, found)
    if options.out is not None:
        tensors = {"hidden": hidden, "target": targets, "live_tiles": counts, "weight": head.weight}
        on_cpu = {key: of.cpu().contiguous() for key, of in tensors.items()}
        save_file(on_cpu, options.out, {"source": about})
    print(f"{about}: {found.density:.2%} of the tiles hold a probability above {THRESHOLD:g}")
    return 0
