"""The built-in rewards by name. Their options are the fields of their classes."""

from grpo_fast.rewards.builtins.math_equivalence import MathVerify
from grpo_fast.rewards.builtins.reasoning_gym import ReasoningGym
from grpo_fast.rewards.builtins.text import (
    ExactMatch,
    Length,
    NumericMatch,
    RegexFormat,
    SoftOverlong,
    TagFormat,
    TagFormatIncremental,
)

BUILTINS: dict[str, type] = {
    "exact_match": ExactMatch,
    "length": Length,
    "math_verify": MathVerify,
    "numeric_match": NumericMatch,
    "reasoning_gym": ReasoningGym,
    "regex_format": RegexFormat,
    "soft_overlong": SoftOverlong,
    "tag_format": TagFormat,
    "tag_format_incremental": TagFormatIncremental,
}
