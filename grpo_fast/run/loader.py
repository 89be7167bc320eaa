"""Load what a run reads before its model: the tokenizer, the tools, and the prompts."""

from __future__ import annotations

import logging
from math import ceil

import torch

from grpo_fast.config.data import PREFIX, VERIFIERS, DatasetConfig
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import plural
from grpo_fast.data import PromptDataset, exclude_overlap, load_held_out, load_prompts
from grpo_fast.environments import Toolsets, load_toolsets
from grpo_fast.policy import load_image_reader, load_tokenizer

logger = logging.getLogger(__name__)


class Loader:
    """The tokenizer, the held-out prompts (None without `evaluation.dataset`) and their tools.

    Evaluation and stages with the same tools share the instances: a server has enough sessions for one step.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.tokenizer, self.images = load_tokenizer(config.model), load_image_reader(config.model)
        self._known: list[tuple[object, Toolsets | None]] = []
        dataset = config.evaluation.dataset
        self.eval_toolsets = toolsets = self.toolsets(config.rollout, dataset or config.dataset)
        self.held_out: PromptDataset | None = None
        if dataset is not None:
            schemas = toolsets.schemas if toolsets else None
            self.held_out = load_held_out(dataset, self.tokenizer, schemas, self.images)

    def toolsets(self, rollout: RolloutConfig, dataset: DatasetConfig) -> Toolsets | None:
        """Return the tools of a rollout on a dataset, loaded once."""
        tasks = dataset if dataset.source.startswith(VERIFIERS) else None
        asked = (rollout.tools, rollout.environment, rollout.function, tasks)
        for known, toolsets in self._known:
            if known == asked:
                return toolsets
        self._known.append((asked, toolsets := load_toolsets(rollout, dataset)))
        return toolsets

    def training(self, config: TrainConfig) -> tuple[Toolsets | None, PromptDataset]:
        """Return the tools of a stage, and its prompts without the held-out questions."""
        toolsets = self.toolsets(config.rollout, config.dataset)
        schemas = toolsets.schemas if toolsets else None
        dataset = load_prompts(config.dataset, self.tokenizer, schemas, self.images)
        if self.held_out is not None:
            plays = toolsets is not None and bool(toolsets.classes)
            generated = config.dataset.source.startswith(PREFIX)  # its prompts are unique per row
            dataset = exclude_overlap(dataset, self.held_out, by_columns=plays and not generated)
        return toolsets, dataset


def use_threads(config: TrainConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)


def with_steps(config: TrainConfig) -> TrainConfig:
    """Return the configuration with `max_steps` in place of `epochs`, from the number of prompts."""
    if config.epochs is None:
        return config
    _, prompts = Loader(config).training(config)
    # 1.1 x 10 is slightly more than 11 in floating point.
    steps = ceil(round(config.epochs * len(prompts) / config.prompts_per_step, 9))
    counted = f"{plural(len(prompts), 'prompt')}, {config.prompts_per_step} a step"
    logger.warning("epochs = %g: max_steps = %d, for %s", config.epochs, steps, counted)
    settings = config.model_dump() | {"epochs": None, "max_steps": steps}
    if 0 < (share := config.optimizer.warmup_steps) < 1:
        settings["optimizer"]["warmup_steps"] = min(ceil(share * steps), steps - 1)
    return TrainConfig.model_validate(settings)
