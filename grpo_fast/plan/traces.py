"""One model's shape and timelines, each made when it is first asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from grpo_fast.plan.activations import forward_run, update_run
from grpo_fast.plan.model_shape import KvLayer, kv_layers, model_shape, skeleton
from grpo_fast.plan.timeline import Irregular, Run, Timeline, repeated
from grpo_fast.policy.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FEW = 3  # layers, of which one is neither the first nor the last: the pattern of all between


class Traces:
    """Of one architecture, trained in one or several ways."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self._models: dict[str, ModelTraces] = {}
        self._bare: dict[str, Bare] = {}

    def of(self, model: ModelConfig) -> ModelTraces:
        """
        Raises:
            ValueError: as `skeleton`.
        """
        key = model.model_dump_json(include={"dtype", "lora", "train_lm_head", "gradient_checkpointing"})
        if key not in self._models:
            self._models[key] = ModelTraces(self.config, model, self.bare(model))
        return self._models[key]

    def bare(self, model: ModelConfig) -> Bare:
        """Of the model without adapters and checkpointing, in the same dtype."""
        if model.dtype not in self._bare:
            alone = ModelConfig(path=model.path, dtype=model.dtype)
            layers = tuple(kv_layers(skeleton(self.config, alone)))
            self._bare[model.dtype] = Bare(layers, timeline(self.config, alone, forward_run))
        return self._bare[model.dtype]


@dataclass(frozen=True)
class Bare:
    """What an engine does with the model alone."""

    layers: tuple[KvLayer, ...]
    forward: Timeline


class ModelTraces:
    """Of a model trained in one way."""

    def __init__(self, config: PretrainedConfig, model: ModelConfig, bare: Bare) -> None:
        self.shape = model_shape(skeleton(config, model), bare.layers)
        self.forward = bare.forward
        self._config = config
        self._model = model
        self._updates: dict[tuple[str, bool, bool], Timeline] = {}

    def update(self, attention: str, *, masked: bool, first: bool) -> Timeline:
        """See `update_run`."""
        first = first and self.shape.wide > 0
        key = (attention, masked, first)
        if key not in self._updates:
            self._updates[key] = timeline(
                self._config,
                self._model,
                lambda module: update_run(module, attention, masked=masked, first=first),
            )
        return self._updates[key]


def timeline(config: PretrainedConfig, model: ModelConfig, run_of: Callable[[nn.Module], Run]) -> Timeline:
    """Of all layers; where they are alike, from runs of a few."""
    count = config.get_text_config().num_hidden_layers
    if count > FEW + 1 and _alike(config):
        runs = (run_of(skeleton(with_layers(config, few), model)) for few in (FEW, FEW + 1))
        try:
            return Timeline.fit(repeated(*runs, times=count - FEW))
        except Irregular:
            pass  # layers differ in ways that the configuration does not list
    return Timeline.fit(run_of(skeleton(config, model)))


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The same architecture with its first layers only."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    shortened = {name: values[:count] for name, values in _per_layer(text).items()}
    for name, value in {**shortened, "num_hidden_layers": count}.items():
        setattr(text, name, value)
    return changed


def _alike(config: PretrainedConfig) -> bool:
    """Whether nothing in the configuration tells one layer from another."""
    text = config.get_text_config()
    differing = [values for values in _per_layer(text).values() if len(set(map(str, values))) > 1]
    dense_ones = any(getattr(text, name, None) for name in ("first_k_dense_replace", "mlp_only_layers"))
    return not differing and not dense_ones and getattr(text, "decoder_sparse_step", 1) == 1


def _per_layer(text: PretrainedConfig) -> dict[str, list[object]]:
    """Settings that are given for each layer."""
    count = text.num_hidden_layers
    return {k: v for k, v in vars(text).items() if isinstance(v, list | tuple) and len(v) == count}
