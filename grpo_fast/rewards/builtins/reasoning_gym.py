"""Score answers to tasks of reasoning-gym with their scorers."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from grpo_fast.data.sources import import_reasoning_gym
from grpo_fast.rewards.builtins.options import (
    CompletionTexts,
    GroupPattern,
    LogMetric,
    Scores,
    column,
    extract,
    match_each,
    reward,
    texts,
)

EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
# Neither lists nor tuples: `[1] * 9999999999` is arithmetic too.
ARITHMETIC = re.compile(r"[\w\s+\-*/^.()]{1,1000}")
FUNCTIONS = "sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|sqrt|exp|log|ln|Abs"
UNSAFE = re.compile(
    r"__"  # Python's inner names
    r"|\.\s*[^\W\d]"  # attributes
    rf"|(?<!\w)(?!(?:{FUNCTIONS})\s*\()[^\W\d]\w*\s*\("  # calls of other names
    r"|\)\s*\("  # calls of what stands in parentheses
    r"|\*\*\s*(?!\d{1,2}(?!\d))"  # powers beyond two digits, or computed
    r"|\*\*\s*\d+\s*\*\*"  # towers of powers
    r"|(?:\)\s*\*\*.*){3}",  # the same in parentheses
    re.DOTALL,
)


@reward
class ReasoningGym:
    """The task's score of the answer, in [0, 1], by the column `entry` of `reasoning_gym:TASK` data.

    Some scorers evaluate the answer as Python. There, an answer that is neither a literal nor plain
    arithmetic scores 0: what a model writes is never executed.
    """

    entry_column: str = "entry"
    extract: GroupPattern | None = None  # the answer in the completion; 0 without a match
    partial_credit: bool = True  # false: scores below 1 become 0

    def __call__(
        self, completions: CompletionTexts, log_metric: LogMetric | None = None, **columns: Any
    ) -> Scores:
        pairs = zip(texts(completions), column(columns, self.entry_column, "entry_column"), strict=True)
        return match_each(self.extract, pairs, lambda pair: self._score(*pair), log_metric)

    def _score(self, text: str, entry: Mapping[str, Any] | None) -> float | None:
        if entry is None:
            return None
        score_answer, evaluates = _scorer(entry["metadata"]["source_dataset"])
        answer = extract(text, self.extract)
        if answer is None or (evaluates and not is_plain(answer)):
            return 0.0
        score = float(score_answer(answer, entry))
        return score if self.partial_credit or score >= 1.0 else 0.0


def is_plain(answer: str) -> bool:
    """Return whether the text is safe to evaluate: a Python literal, or short arithmetic."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the model's syntax
            ast.literal_eval(answer)
        return True
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ARITHMETIC.fullmatch(answer) is not None and UNSAFE.search(answer) is None


@cache
def _scorer(task: str) -> tuple[Callable[[str, Mapping[str, Any]], float], bool]:
    import_reasoning_gym()
    from reasoning_gym.factory import get_score_answer_fn

    score_answer = get_score_answer_fn(task)
    return score_answer, bool(EVALUATES.search(inspect.getsource(score_answer)))
