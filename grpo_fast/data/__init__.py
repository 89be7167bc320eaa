"""Datasets in, tokenised prompts out."""

from grpo_fast.data.dataset import LoadReport, PromptDataset, load_prompts
from grpo_fast.data.overlap import exclude_overlap
from grpo_fast.data.sampler import PromptSampler
from grpo_fast.data.types import Message, Prompt

__all__ = [
    "LoadReport",
    "Message",
    "Prompt",
    "PromptDataset",
    "PromptSampler",
    "exclude_overlap",
    "load_prompts",
]
