"""A run, from its configuration to its report."""

from grpo_fast.run.build import build_trainer as build_trainer
from grpo_fast.run.loop import train as train
