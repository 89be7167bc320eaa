"""Configurations of Axolotl, TRL and NeMo-RL into ours, every key accounted for."""

from grpo_fast.convert.api import convert, convert_file
from grpo_fast.convert.conversion import Conversion, Row

__all__ = ["Conversion", "Row", "convert", "convert_file"]
