"""The policy: packed batches in, hidden states out; its reference, its weights and its export."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from grpo_fast.data.table import EXPERTS
from grpo_fast.distributed.shards import whole
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.head import HeadParameters
from grpo_fast.head.parameters import head_parameters, is_quantized
from grpo_fast.policy.adapters import adapted_weights, base_name, merged
from grpo_fast.policy.architecture import backbone, fix_rope
from grpo_fast.policy.experts import chosen_share, is_expert
from grpo_fast.policy.flash import PACKAGES
from grpo_fast.policy.layout import PackedLayout, RowLayout
from grpo_fast.policy.optimizer import MASTER
from grpo_fast.policy.packing import PackedBatch, TokenCosts
from grpo_fast.policy.quantization import count_numbers, dequantized
from grpo_fast.policy.source import save_model
from grpo_fast.policy.vision import Vision, language_model, language_parameters

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_fast.data.images import ImageReader
    from grpo_fast.policy.routing import RoutingReplay
    from grpo_fast.policy.sharding import ShardedModel

T = TypeVar("T")


class Policy:
    """A causal language model in training, its tokenizer and its frozen reference.

    Args:
        model: a transformers model, or a peft model around one, with the attention of `load_policy`.
        tokenizer: the model's.
        attention: of packed batches: "sdpa" or one of `flash.PACKAGES`.
        packs: false: padded batches, one completion per row, by the model's own attention.
        reference: a frozen copy, or another model; None: LoRA's adapters are switched off instead.
        head_tolerance: of the head's gradient, as in `linear_logprob`.
        router_aux_loss: coefficient of the load-balancing loss that an update adds; None: none.
        routing: sends tokens to the experts in a batch's inputs, except in the reference.
        image_reader: reads the images of prompts; None: they are refused.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        attention: str = "sdpa",
        packs: bool = True,
        reference: PreTrainedModel | None = None,
        head_tolerance: float | None = None,
        router_aux_loss: float | None = None,
        routing: RoutingReplay | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.attention = attention
        self.packs = packs
        self.head_tolerance = head_tolerance
        self.router_aux_loss = router_aux_loss
        self._reference = None
        if reference is not None:
            self._reference = Policy(reference, tokenizer, attention=attention)
        self._shards: ShardedModel | None = None
        self.routing = routing
        self.image_reader = image_reader

    @cached_property
    def vision(self) -> Vision:
        """The model's vision tower, or ValueError for a policy without an image reader."""
        if self.image_reader is None:
            raise ValueError("the batch has images, and the policy has no image_reader; give Policy one")
        return Vision(self.base_model, self.image_reader)

    def shard(self, world: World) -> None:
        """Divide the rows of the weights, and of the reference's, over the ranks, as `ShardedModel`."""
        from grpo_fast.policy.sharding import ShardedModel  # imports all of FSDP

        for policy in filter(None, (self, self._reference)):
            policy._shards = ShardedModel(policy.model, policy.base_model, world)

    def fix_rope(self, length: int) -> None:
        """Pin the RoPE of policy and reference to `length` tokens, as `architecture.fix_rope`."""
        for policy in filter(None, (self, self._reference)):
            fix_rope(policy.base_model, length)

    @property
    def sharded(self) -> bool:
        """Whether each rank has only its rows of every weight, and all ranks run a forward together."""
        return self._shards is not None

    def run(self, work: Callable[[], T]) -> T:
        """Call `work`, which may read weights: `hidden_states`, `head`, the model.

        With sharded weights all ranks call this together, and a backward must follow if gradients are on.
        """
        return work() if self._shards is None else self._shards.run(work)

    @property
    def base_model(self) -> PreTrainedModel:
        """The transformers model, which contains the adapters, if any."""
        model: Any = self.model
        return model.get_base_model() if self.has_adapters else model

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def quantized(self) -> bool:
        """Whether linear layers are in 4 bits."""
        return any(map(is_quantized, self.base_model.parameters()))

    @property
    def device(self) -> torch.device:
        return self.base_model.device

    @property
    def token_costs(self) -> TokenCosts:
        """Multiplications of a forward for each input token, target and pair of tokens."""
        config, table = self.base_model.config.get_text_config(), self.head_weight.numel()
        embedding: Any = self.base_model.get_input_embeddings()
        tables = table if embedding.weight is self.head_weight else 2 * table
        language = language_parameters(self.base_model)
        visited = {True: chosen_share(config), False: 1.0}
        layers = sum(
            count_numbers(weight) * visited[is_expert(name, weight)]
            for name, weight in self.base_model.named_parameters()
            if weight in language
        )
        pair = 2 * config.hidden_size * config.num_hidden_layers  # scores, and the sum of values
        return TokenCosts(input=layers - tables, target=table, pair=pair)

    @property
    def head_weight(self) -> Tensor:
        """The output head's weight (V, H), the tensor of `trainable` if it trains."""
        return head_parameters(self.base_model).weight

    @property
    def head(self) -> HeadParameters:
        """The head for the result of `hidden_states`; with sharded weights read it within `run`."""
        return replace(head_parameters(self.base_model), tolerance=self.head_tolerance)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end tokens of tokenizer and generation config."""
        configured = self.base_model.generation_config.eos_token_id
        ids = set(configured if isinstance(configured, (list, tuple)) else [configured])
        ids.add(self.tokenizer.eos_token_id)
        return tuple(sorted(i for i in ids if i is not None))

    def hidden_states(
        self, batch: PackedBatch, layout: PackedLayout | None = None, *, routed: list[Tensor] | None = None
    ) -> Tensor:
        """Compute the hidden states (N, H) after the final norm that predict `batch.targets`.

        Args:
            layout: the batch's, if it exists already.
            routed: receives the logits of each layer's router, (T, E) for all T input tokens.
        """
        settings: dict[str, Any] = {} if routed is None else {"output_router_logits": True}
        if not self.packs:
            return self._hidden_states_of_rows(batch, routed, settings)
        # transformers does not touch a 4-D mask, so a tiny one saves its own T × T mask.
        settings["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
        inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
        model, attention, both_ways = backbone(self.base_model), self.attention, None
        if any(batch.images):
            model = language_model(self.base_model)
            inputs, both_ways = self.vision.packed(batch)
            if both_ways is not None and attention in PACKAGES:
                attention = "sdpa"  # flash-attention is causal only
        layout = layout or PackedLayout(batch, attention, both_ways)
        layout.experts = batch.inputs.get(EXPERTS)
        output = model(**inputs, **settings, use_cache=False, packed_layout=layout)
        if routed is not None:
            routed += output.router_logits
        return output.last_hidden_state[0].index_select(0, batch.loss_index)

    def _hidden_states_of_rows(
        self, batch: PackedBatch, routed: list[Tensor] | None, settings: dict[str, Any]
    ) -> Tensor:
        """Compute `hidden_states` with one document per row, padded at the end."""
        if any(batch.images):
            raise ValueError("prompts with images must be packed: leave model.packing at auto")
        bounds = batch.cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        # Sharded ranks must run the same number of forwards.
        layout = RowLayout(bounds[:-1], lengths, batch.input_ids.device, pads="right", together=self.sharded)
        model, batches = backbone(self.base_model), layout.batches
        outputs = [
            model(input_ids=batch.input_ids[rows.tokens], use_cache=False, **settings) for rows in batches
        ]
        if routed is not None:  # (B L, E) of each of the batches, by layer
            for layer in zip(*(output.router_logits for output in outputs), strict=True):
                pairs = zip(layer, batches, strict=True)
                routed.append(layout.join([logits.view(*rows.tokens.shape, -1) for logits, rows in pairs]))
        hidden = layout.join([output[0] for output in outputs])
        return hidden.index_select(0, layout.tokens.argsort()[batch.loss_index])

    @contextlib.contextmanager
    def reference(self) -> Iterator[Policy]:
        """Yield the initial policy, or the model of `reference.path`, without gradients."""
        with torch.no_grad():
            if self._reference is not None:
                self._reference.packs = self.packs
                yield self._reference
            elif self.has_adapters:
                without_replay = contextlib.nullcontext() if self.routing is None else self.routing.paused()
                with cast("PeftModel", self.model).disable_adapter(), without_replay:
                    yield self
            else:
                raise RuntimeError("the policy has no reference; load it with needs_reference=True")

    def reference_weights(self) -> dict[str, Tensor]:
        """Return the frozen copy's live weights by name; empty without one, or if they are sharded."""
        if self._reference is None or self.sharded:
            return {}
        return dict(self._reference.model.named_parameters())

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name. A tied weight appears once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the live trained parameters by their names in a checkpoint."""
        return {MASTER + name: parameter.detach() for name, parameter in self.trainable().items()}

    def base_weights(self) -> dict[str, Tensor]:
        """Return the live weights without adapters by their names in a model's checkpoint, tied ones once."""
        weights: dict[str, Tensor] = {}
        # Without the tables that a quantized layer saves next to its weight.
        unseen = {id(t) for t in (*self.base_model.parameters(), *self.base_model.buffers())}
        copies = getattr(self.base_model, "all_tied_weights_keys", {})  # which a checkpoint leaves out
        state = self.base_model.state_dict(keep_vars=True).items()
        for name, tensor in sorted(state, key=lambda item: base_name(item[0]) in copies):
            if ".lora_" not in name and id(tensor) in unseen:
                unseen.remove(id(tensor))
                weights[base_name(name)] = tensor
        return weights

    def named_weights(self, *, adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield `base_weights` in full precision, with or without merged adapters, as inference engines load.

        The model is unchanged: merging in place and back would round bf16 weights each time. Tensors without
        an adapter are live. All ranks gather sharded ones one by one. Quantized ones are dequantized.
        """
        adapted = self._adapted_weights() if adapters else {}
        modules = dict(self.base_model.named_modules())
        for name, tensor in self.base_weights().items():
            if name in adapted:
                yield name, merged(adapted[name])
            elif is_quantized(tensor):
                yield name, dequantized(modules[name.removesuffix(".weight")])
            else:
                yield name, whole(tensor)

    def changing_weights(self) -> set[str]:
        """Return the names in `named_weights` of tensors that training changes."""
        trained = {name for name, tensor in self.base_weights().items() if tensor.requires_grad}
        return trained.union(self._adapted_weights())

    def _adapted_weights(self) -> dict[str, Any]:
        return dict(adapted_weights(self.base_model)) if self.has_adapters else {}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write safetensors with merged adapters, configurations, tokenizer and image processor.

        The folder loads in transformers and vLLM. All ranks gather sharded weights, and rank 0 writes.
        """
        world = SINGLE_PROCESS if self._shards is None else self._shards.world
        weights = {name: tensor.to("cpu") for name, tensor in self.named_weights() if world.is_main}
        if world.is_main:
            save_model(self.base_model, weights, self.tokenizer, folder)
            self.save_processor(folder)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter as peft loads it, and the tokenizer; ValueError if there is none."""
        if not self.has_adapters:
            raise ValueError(
                "there is no adapter: the run trains whole weights (model.lora = null); export those"
            )
        self.model.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(folder)

    def save_processor(self, folder: str | Path) -> None:
        """Copy the files of the image processor, if there is one."""
        for file in self.image_reader.files if self.image_reader else ():
            shutil.copy(file, folder)
