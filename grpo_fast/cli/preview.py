"""A group as a person reads it: the prompt as the model sees it, its completions, what each earned."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_fast.experience import Group


def show_group(group: Group, reward_names: Sequence[str], rendered_prompt: str) -> str:
    """Several lines of plain text."""
    lines = [
        f"prompt of row {group.prompt.index}, {len(group.prompt.token_ids)} tokens",
        _block(rendered_prompt),
    ]
    answers = zip(group.completions, group.rewards.tolist(), group.reward_table.tolist(), strict=True)
    for number, (completion, reward, row) in enumerate(answers, 1):
        parts = ", ".join(f"{name} {_value(value)}" for name, value in zip(reward_names, row, strict=True))
        cut = ", truncated" if completion.truncated else ""
        lines.append(
            f"completion {number}: reward {_value(reward)} ({parts}), {len(completion.token_ids)} tokens{cut}"
        )
        lines.append(_block(completion.text))
    spread = group.rewards.std(correction=0).item()
    verdict = "no spread: this group teaches nothing" if group.flat else f"standard deviation {spread:.3f}"
    lines.append(f"group: mean reward {_value(group.rewards.nanmean().item())}, {verdict}")
    return "\n".join(lines) + "\n"


def _block(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines() or [""])


def _value(value: float) -> str:
    return "not applicable" if value != value else f"{value:.3f}"
