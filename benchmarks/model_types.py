"""`python -m benchmarks models`: what each type of language model of the installed transformers does here.

A tiny random model of each is trained in float32 and held against transformers' own forward, one sequence at
a time: log-probabilities and gradients with shared prompts, what the transformers engine draws, LoRA and its
export, and the plan. A refusal is told in its own words.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from grpo_fast.config import TrainConfig
from grpo_fast.plan import Shapes, device_budget, plan
from grpo_fast.policy import Policy, load_policy, pack
from grpo_fast.policy.architecture import check_architecture
from grpo_fast.policy.config import LoraConfig, ModelConfig
from grpo_fast.policy.recurrent import keep_step_limits
from grpo_fast.policy.vision import auto_class
from grpo_fast.rollout import Sampling, make_engine
from grpo_fast.rollout.config import RolloutConfig
from grpo_fast.table import Completions

from .machine import environment
from .models import make_tokenizer
from .record import write_json
from .tables import DASH, console
from .tiny import VOCABULARY, kinds, tiny_config, tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RECORD = Path(__file__).resolve().parent / "results" / "models.json"
LIMITS = {"logprobs": 1e-5, "gradients": 2e-5, "rollout": 1e-5, "lora": 1e-5}
"""Of rounding: Gemma 4's own gradient in float32 is 1.1e-5 from its own in float64."""
SECONDS = 180  # that one type may take
GROUPS = ((19, (9, 14, 5)), (7, (12, 1, 8)), (31, (20, 6)))  # tokens of a prompt, and of its completions
OWN: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
R = TypeVar("R")
PACKED, ROWS, REFUSED, NOT_BUILT = "packed", "rows", "refused", "not built"


@dataclass(frozen=True)
class Row:
    """What was found of one type; None: not measured, for one of the reasons."""

    kind: str
    state: str
    logprobs: float | None = None  # nats, the largest difference
    gradients: float | None = None  # relative, of all parameters' together
    computed: float | None = None  # tokens that a layer computes, where 1 is each prompt once
    rollout: float | None = None  # nats, as `logprobs`
    lora: float | None = None  # relative, of the exported model's logits
    planned: bool | None = None
    reasons: dict[str, str] = field(default_factory=dict)  # by column

    @property
    def trains(self) -> bool:
        return self.gradients is not None

    @property
    def wrong(self) -> list[str]:
        """The columns with numbers that rounding does not explain."""
        found = {column: getattr(self, column) for column in LIMITS}
        return [
            column for column, number in found.items() if number is not None and not number <= LIMITS[column]
        ]


def check(kind: str, seed: int = 0) -> Row:
    """Everything about one type, in this process."""
    config = None
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
            return Row(kind, NOT_BUILT, reasons={"built": words(_refused(config) or error)})
        make_tokenizer(VOCABULARY).save_pretrained(folder)
        settings = ModelConfig(path=folder, dtype="float32", device="cpu")
        try:
            policy = load_policy(settings)
        except Exception as error:
            return Row(kind, REFUSED, reasons={"loaded": words(error)})
        row, table = Row(kind, PACKED if policy.packs else ROWS), _completions(seed)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "logprobs": lambda: _trained(policy, own, table, seed),
            "rollout": lambda: {"rollout": _drawn(policy, own, table, seed)},
            "lora": lambda: {"lora": _adapted(settings, config, table, Path(folder) / "merged")},
            "planned": lambda: {"planned": _planned(settings, config)},
        }
        for column, measure in parts.items():
            try:
                row = replace(row, **measure())
            except Exception as error:
                row = replace(row, reasons={**row.reasons, column: words(error)})
        return row


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


def words(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""  # of an assertion
    return kind + " ".join(said.split())[:400]


def _completions(seed: int) -> Completions:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCABULARY, (count,), generator=generator).tolist())

    prompts = [(draw(tokens), lengths) for tokens, lengths in GROUPS]
    rows = [(prompt, draw(length), prompt) for prompt, lengths in prompts for length in lengths]
    groups = {prompt: number for number, (prompt, _) in enumerate(prompts)}
    return Completions.of(*zip(*[(p, c, groups[p]) for p, c, _ in rows], strict=True))


def _own_logprobs(own: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """(N,) of the sequence alone, by the model's own forward."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = own(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    alone = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return alone.gather(1, torch.tensor(tokens)[:, None])[:, 0]


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
    right = torch.cat([_own_logprobs(own, *sequence) for sequence in sequences])
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


@torch.no_grad()
def _drawn(policy: Policy, own: Any, table: Completions, seed: int) -> float:
    """What the transformers engine says of its completions."""
    prompts = [table.prompt_of(row).tolist() for row in (0, 3, 6)]
    with make_engine(RolloutConfig(engine="transformers"), policy, max_length=64) as engine:
        groups = engine.generate(prompts, 3, Sampling(12, seed=seed))
    differences = [
        _own_logprobs(own, prompt, completion.token_ids) - torch.tensor(completion.logprobs)
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]
    return float(torch.cat(differences).abs().max())


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
        "dataset": {"source": "-"},
        "rewards": [{"reward": "length"}],
        "rollout": {"engine": "transformers", "max_completion_length": 32},
    }
    shapes, device = Shapes(config), device_budget("80GiB")
    return plan(TrainConfig.model_validate(run), shapes, device, prompt_length=32).largest is not None


def _work(check: Callable[[str], Any], waiting: Sequence[str], rows: Any) -> None:
    """The other process."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for kind in waiting:
        rows.send(check(kind))


def measured(asked: Sequence[str], seed: int) -> Iterator[Row]:
    """A row of each."""

    def refused(kind: str, why: str) -> Row:
        return Row(kind, REFUSED, reasons={"loaded": why})

    return in_a_process(asked, partial(check, seed=seed), refused, SECONDS)


def in_a_process(
    asked: Sequence[str], check: Callable[[str], R], failed: Callable[[str, str], R], seconds: float
) -> Iterator[R]:
    """What `check` says of each type, or `failed` where it ends its process or takes more than these seconds,
    after which another process goes on."""
    context, waiting = multiprocessing.get_context("spawn"), list(asked)
    while waiting:
        rows, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(check, waiting, theirs), daemon=True)
        process.start()
        theirs.close()
        ended = f"it took more than {seconds:g} s"
        try:
            while waiting and rows.poll(seconds):
                yield rows.recv()
                waiting.pop(0)
        except EOFError:
            ended = "its process ended"
        process.kill()
        process.join()
        if waiting:
            yield failed(waiting.pop(0), ended)


HEADS = ("type", "batch", "Δ log p", "Δ gradient", "computed", "Δ rollout", "Δ LoRA", "planned", "reasons")


def cells(row: Row) -> list[str]:
    """One line of the table; numbers that are wrong are bold."""

    def number(column: str) -> str:
        value = getattr(row, column)
        shown = DASH if value is None else f"{value:.0e}"
        return f"**{shown}**" if column in row.wrong else shown

    planned = {True: "yes", False: "no", None: DASH}[row.planned]
    counted = DASH if row.computed is None else f"{row.computed:.1f}"
    reasons = "; ".join(f"{column}: {why}" for column, why in row.reasons.items()).replace("|", "\\|")
    return [
        *(row.kind, row.state, number("logprobs"), number("gradients"), counted),
        *(number("rollout"), number("lora"), planned, reasons),
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """What is built, trains, is packed and refused, and the worst number of each column."""
    built = [row for row in rows if row.state != NOT_BUILT]
    trained = [row for row in built if row.trains]
    packed = sum(row.state == PACKED for row in trained)
    share = 100 * len(trained) / max(1, len(built))
    lines = [
        f"{len(rows)} types, of which transformers builds {len(built)}; {len(trained)} of these train "
        f"({share:.1f} %), {packed} packed and {len(trained) - packed} as rows"
    ]
    for column in LIMITS:
        found = [(getattr(row, column), row.kind) for row in rows if getattr(row, column) is not None]
        if found:
            lines.append(f"worst {column}: {max(found)[0]:.1e}, of {max(found)[1]}; {len(found)} measured")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these types (all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (%(default)s)")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} of benchmarks/results")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a type that transformers does not have.
    """
    if unknown := {*(options.only or ())} - {*kinds()}:
        raise ValueError(f"--only {min(unknown)}: transformers has no language model of this type")
    screen, rows = console(), list[Row]()
    for row in measured(options.only or kinds(), options.seed):
        rows.append(row)
        screen.print("  ".join(cell for cell in cells(row) if cell != DASH), markup=False, soft_wrap=True)
    screen.print("", *summary(rows), sep="\n", markup=False, soft_wrap=True)
    if options.record:
        found = {row.kind: row for row in (recorded() if options.only else [])} | {r.kind: r for r in rows}
        document = {"models": [asdict(found[kind]) for kind in kinds() if kind in found]}
        write_json(RECORD, document | {"environment": environment(torch.device("cpu"))})
        screen.print("`python -m benchmarks readme` writes docs/models.md", markup=False)
    return int(any(row.wrong for row in rows))


def recorded() -> list[Row]:
    """The rows of the checked-in record."""
    return [Row(**row) for row in json.loads(RECORD.read_text(encoding="utf-8"))["models"]]


def as_table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Heads, rows and the lines below, of a record's rows."""
    found = [Row(**row) for row in rows]
    return {"heads": HEADS, "rows": [cells(row) for row in found], "summary": summary(found)}
