"""Datasets in, tokenised prompts out."""

from grpo_fast.data.dataset import LoadReport, PromptDataset, exclude_overlap, load_held_out, load_prompts
from grpo_fast.data.sampler import PromptSampler
from grpo_fast.data.types import Message, Prompt

__all__ = [
    "LoadReport",
    "Message",
    "Prompt",
    "PromptDataset",
    "PromptSampler",
    "exclude_overlap",
    "load_held_out",
    "load_prompts",
]
