"""What commands print: a scored group and an evaluation, for a person or a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_fast.data.types import spoken
from grpo_fast.evaluate import Evaluation
from grpo_fast.experience import Group
from grpo_fast.run_record.summary import score_text


def group_text(group: Group, reward_names: Sequence[str], rendered_prompt: str) -> str:
    """The prompt as the model sees it, its completions, and what each earned."""
    lines = [
        f"prompt of row {group.prompt.index}, {len(group.prompt.token_ids)} tokens",
        _block(rendered_prompt),
    ]
    answers = zip(group.completions, group.rewards.tolist(), group.reward_table.tolist(), strict=True)
    for number, (completion, reward, row) in enumerate(answers, 1):
        parts = ", ".join(f"{name} {_value(value)}" for name, value in zip(reward_names, row, strict=True))
        size = f"{completion.num_sampled} tokens{', truncated' if completion.truncated else ''}"
        lines.append(f"completion {number}: reward {_value(reward)} ({parts}), {size}")
        if completion.episode is None:
            lines.append(_block(completion.text))
        for who, what in spoken(completion.episode.messages) if completion.episode else ():
            lines += [f"  {who}", _block(what)]
    spread = group.rewards.std(correction=0).item()
    verdict = "no spread: this group teaches nothing" if group.flat else f"standard deviation {spread:.3f}"
    lines.append(f"group: mean reward {_value(group.rewards.nanmean().item())}, {verdict}")
    return "\n".join(lines) + "\n"


def _block(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines() or [""])


def _value(value: float) -> str:
    return "not applicable" if value != value else f"{value:.3f}"


def evaluation_table(result: Evaluation, ks: Sequence[int], temperature: float) -> str:
    """The figures for a person."""
    rows = [(f"pass@{k}", score_text(result.pass_at(k), result.interval_at(k))) for k in sorted(set(ks))]
    if result.num_samples > 1:
        rows.append((f"mean@{result.num_samples}", score_text(result.score, result.interval)))
    rows += [("mean reward", f"{result.mean_reward:.4f}"), ("truncated", f"{100 * result.truncated:.1f} %")]
    skipped = f", {result.skipped} more without a score" if result.skipped else ""
    answers = "1 answer" if result.num_samples == 1 else f"{result.num_samples} answers"
    head = (
        f"{result.n} questions{skipped}, {answers} each at temperature {temperature:g}; "
        f"right: {result.reward_name} >= {result.threshold:g}; 95 % intervals over questions"
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join([head, *(f"{name:<{width}}  {value}" for name, value in rows)])


def evaluation_record(result: Evaluation, ks: Sequence[int]) -> dict[str, Any]:
    """The figures for a program, with every answer; null stands for a score that does not apply."""
    return {
        "n": result.n,
        "skipped": result.skipped,
        "num_samples": result.num_samples,
        "reward": result.reward_name,
        "threshold": result.threshold,
        "pass_at": {str(k): result.pass_at(k) for k in ks},
        "intervals": {str(k): result.interval_at(k) for k in ks},
        "mean_at_n": result.score,
        "mean_reward": result.mean_reward,
        "truncated": result.truncated,
        "questions": [
            {
                "index": prompt.index,
                "prompt": prompt.prompt,
                "scores": [None if score != score else score for score in scores],
                "completions": [c.text if c.episode is None else c.episode.messages for c in group],
                "tokens": [completion.num_sampled for completion in group],
            }
            for prompt, scores, group in zip(result.prompts, result.scores, result.completions, strict=True)
        ],
    }
