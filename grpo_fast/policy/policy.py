"""The policy: a model with a lifetime. Packed batches in, hidden states out; the head is for others."""

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

_WITH_ROUTERS = {"output_router_logits": True}


class Policy:
    """A causal language model under training, its tokenizer and, when asked for, its frozen reference.

    Args:
        model: a transformers model, or a peft model around one; its attention must already be set up
            as `load_policy` does.
        attention: "sdpa" or one of `flash.PACKAGES`, of packed batches.
        packs: false: one completion a row, by the model's own attention; the tables it computes are laid out
            without shared prompts.
        reference: a frozen copy, or another model; without one, LoRA's adapters are switched off instead.
        head_tolerance: of the head's gradient, as `linear_logprob` takes it.
        router_aux_loss: coefficient of the load-balancing loss that an update adds; None: none.
        routing: sends tokens to the experts that a batch's inputs name, in all but the reference.
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
        """What the model sees of images; raises ValueError for a policy without an image reader."""
        if self.image_reader is None:
            raise ValueError("the batch has images, and the policy has no image_reader; give Policy one")
        return Vision(self.base_model, self.image_reader)

    def shard(self, world: World) -> None:
        """Divide the weights, and those of the reference, over the ranks: from now on each has its rows.

        Raises:
            ValueError: as `ShardedModel`.
        """
        from grpo_fast.policy.sharding import ShardedModel  # imports all of FSDP

        for policy in filter(None, (self, self._reference)):
            policy._shards = ShardedModel(policy.model, policy.base_model, world)

    def fix_rope(self, length: int) -> None:
        """One set of rotary frequencies for all sequences of a run, the longest of which has `length` tokens.

        See `architecture.fix_rope`; the reference's are the same.
        """
        for policy in filter(None, (self, self._reference)):
            fix_rope(policy.base_model, length)

    @property
    def sharded(self) -> bool:
        """Whether each rank has its rows of every weight only, so that a forward is one of all ranks."""
        return self._shards is not None

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns. All that reads weights is called in here: `hidden_states`, `head`, the model.

        Where weights are sharded, all ranks are here together, and a backward follows where gradients are on.
        """
        return work() if self._shards is None else self._shards.run(work)

    @property
    def base_model(self) -> PreTrainedModel:
        """The transformers model; adapters, if any, sit inside it and take part in its forward."""
        model: Any = self.model
        return model.get_base_model() if self.has_adapters else model

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def quantized(self) -> bool:
        """Whether linear layers are held in 4 bits."""
        return any(map(is_quantized, self.base_model.parameters()))

    @property
    def device(self) -> torch.device:
        return self.base_model.device

    @property
    def token_costs(self) -> TokenCosts:
        """Multiplications of a forward: of an input token, with the experts it visits, of a target, of a pair
        of tokens."""
        config, table = self.base_model.config.get_text_config(), self.head_weight.numel()
        embedding: Any = self.base_model.get_input_embeddings()
        tables = table if embedding.weight is self.head_weight else 2 * table
        own = language_parameters(self.base_model)
        visited = {True: chosen_share(config), False: 1.0}
        layers = sum(
            count_numbers(weight) * visited[is_expert(name, weight)]
            for name, weight in self.base_model.named_parameters()
            if weight in own
        )
        pair = 2 * config.hidden_size * config.num_hidden_layers  # scores, and the sum of values
        return TokenCosts(input=layers - tables, target=table, pair=pair)

    @property
    def head_weight(self) -> Tensor:
        """(V, H), as `trainable` has it where it trains."""
        return head_parameters(self.base_model).weight

    @property
    def head(self) -> HeadParameters:
        """The head for what `hidden_states` returns; where weights are sharded, read it within `run`."""
        return replace(head_parameters(self.base_model), tolerance=self.head_tolerance)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion: the tokenizer's and the generation config's."""
        configured = self.base_model.generation_config.eos_token_id
        ids = set(configured if isinstance(configured, (list, tuple)) else [configured])
        ids.add(self.tokenizer.eos_token_id)
        return tuple(sorted(i for i in ids if i is not None))

    def hidden_states(
        self, batch: PackedBatch, layout: PackedLayout | None = None, *, routed: list[Tensor] | None = None
    ) -> Tensor:
        """(N, H) after the final norm, in the model's dtype: the rows that predict `batch.targets`.

        Args:
            layout: the batch's, where it is there already.
            routed: gets the logits of each layer's router, (T, E) of all T input tokens.
        """
        if not self.packs:
            return self._hidden_states_of_rows(batch, routed)
        # A 4-D mask is handed on untouched, so a tiny one keeps transformers from building its own T × T.
        untouched = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
        given: dict[str, Any] = {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.position_ids[None],
        }
        reads, attention, both_ways = backbone(self.base_model), self.attention, None
        if any(batch.images):
            reads = language_model(self.base_model)
            given, both_ways = self.vision.packed(batch)
            if both_ways is not None and attention in PACKAGES:
                attention = "sdpa"  # for these batches, which the other cannot compute
        layout = layout or PackedLayout(batch, attention, both_ways)
        layout.experts = batch.inputs.get(EXPERTS)
        output = reads(
            **given,
            use_cache=False,
            attention_mask=untouched,
            packed_layout=layout,
            **_WITH_ROUTERS if routed is not None else {},
        )
        if routed is not None:
            routed += output.router_logits
        return output.last_hidden_state[0].index_select(0, batch.loss_index)

    def _hidden_states_of_rows(self, batch: PackedBatch, routed: list[Tensor] | None) -> Tensor:
        """`hidden_states` with a row a document: padding comes last, where nothing before it looks."""
        if any(batch.images):
            raise ValueError("prompts with images are packed alone: leave model.packing at auto")
        bounds = batch.cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        # As many forwards on each rank, where each is one of all.
        layout = RowLayout(bounds[:-1], lengths, batch.input_ids.device, pads="right", together=self.sharded)
        model, settings = backbone(self.base_model), _WITH_ROUTERS if routed is not None else {}
        found = [
            model(input_ids=batch.input_ids[rows.tokens], use_cache=False, **settings)
            for rows in layout.batches
        ]
        if routed is not None:  # (B L, E) of each of the batches, by layer
            for layer in zip(*(output.router_logits for output in found), strict=True):
                rows = [
                    logits.view(*rows.tokens.shape, -1)
                    for logits, rows in zip(layer, layout.batches, strict=True)
                ]
                routed.append(layout.join(rows))
        hidden = layout.join([output[0] for output in found])
        return hidden.index_select(0, layout.tokens.argsort()[batch.loss_index])

    @contextlib.contextmanager
    def reference(self) -> Iterator[Policy]:
        """The policy as it was loaded, or the other model that it is compared with, without gradients.

        Raises:
            RuntimeError: full fine-tuning, and the policy was loaded without a reference.
        """
        with torch.no_grad():
            if self._reference is not None:
                self._reference.packs = self.packs
                yield self._reference
            elif self.has_adapters:
                own_routing = contextlib.nullcontext() if self.routing is None else self.routing.paused()
                with cast("PeftModel", self.model).disable_adapter(), own_routing:
                    yield self
            else:
                raise RuntimeError("the policy has no reference; load it with needs_reference=True")

    def reference_weights(self) -> dict[str, Tensor]:
        """The frozen copy's weights, live, by name; empty where there is none that has whole weights."""
        if self._reference is None or self.sharded:
            return {}
        return dict(self._reference.model.named_parameters())

    def trainable(self) -> dict[str, nn.Parameter]:
        """What the optimiser changes, by name. A tied weight appears once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def saved_weights(self) -> dict[str, Tensor]:
        """What the optimiser changes, live, under the names that a checkpoint has for it."""
        return {MASTER + name: parameter.detach() for name, parameter in self.trainable().items()}

    def base_weights(self) -> dict[str, Tensor]:
        """The weights under their checkpoint's names, live, without adapters; a tied head is not repeated."""
        weights: dict[str, Tensor] = {}
        # Each once, and without the tables that a quantised layer saves beside its weight.
        unseen = {id(t) for t in (*self.base_model.parameters(), *self.base_model.buffers())}
        copies = getattr(self.base_model, "all_tied_weights_keys", {})  # which a checkpoint leaves out
        state = self.base_model.state_dict(keep_vars=True).items()
        for name, tensor in sorted(state, key=lambda item: base_name(item[0]) in copies):
            if ".lora_" not in name and id(tensor) in unseen:
                unseen.remove(id(tensor))
                weights[base_name(name)] = tensor
        return weights

    def named_weights(self, *, adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """`base_weights` in full precision, with adapters merged or without: what an inference engine loads.

        The model itself is untouched: merging in place and back would round bf16 weights each time. Tensors
        without an adapter are the live ones, not copies; sharded ones are gathered one by one, by all ranks,
        and quantised ones are the numbers that the layers compute with.
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
        """The names in `named_weights` of what training changes."""
        trained = {name for name, tensor in self.base_weights().items() if tensor.requires_grad}
        return trained.union(self._adapted_weights())

    def _adapted_weights(self) -> dict[str, Any]:
        """The layers that LoRA wraps, by their weights' names."""
        return dict(adapted_weights(self.base_model)) if self.has_adapters else {}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write safetensors, configuration, generation configuration and tokenizer, adapters merged; and the
        processor as it was, of a model that sees images.

        The folder loads in transformers and vLLM alike. Sharded weights are gathered by all ranks, and rank 0
        writes.
        """
        world = SINGLE_PROCESS if self._shards is None else self._shards.world
        weights = {name: tensor.to("cpu") for name, tensor in self.named_weights() if world.is_main}
        if world.is_main:
            save_model(self.base_model, weights, self.tokenizer, folder)
            self.save_processor(folder)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter alone, as peft reads it, and the tokenizer.

        Raises:
            ValueError: the policy has none.
        """
        if not self.has_adapters:
            raise ValueError(
                "there is no adapter: the run trains whole weights (model.lora = null); export those"
            )
        self.model.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(folder)

    def save_processor(self, folder: str | Path) -> None:
        """What is beside the tokenizer of a model that sees images, as it was."""
        for file in self.image_reader.files if self.image_reader else ():
            shutil.copy(file, folder)
