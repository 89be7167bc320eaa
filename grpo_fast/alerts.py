"""Warnings while a run goes on: reward hacking, collapse, divergence, drift. Each says what to try.

An alert is raised once, when its figure crosses its threshold, and not again until the figure has come back.
What is measured is a mean over the last `window` steps, so one odd step raises nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from grpo_fast.section import Fraction, PositiveInt, Section

ALERTS_FILE = "alerts.jsonl"

