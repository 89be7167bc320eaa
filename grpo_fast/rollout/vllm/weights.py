"""Where each weight of a checkpoint lies in vLLM's model, watched while it loads; how new values get there.

Engines fuse (q, k, v into one tensor; gate and up into one), pad vocabularies, slice for tensor parallelism
and sometimes repack. Every loader ends in `Tensor.copy_`, so watching these copies tells for any architecture
which part of which weight went where. From that follows the cheapest way for new values:

- shared: no copy; the trainer's parameter is that part of vLLM's tensor.
- direct: the copies that loading made are made again, for what training changes.
- portable: vLLM's `reload_weights`, everything: right for any layout, packed and quantised ones too.
- adapter: LoRA's matrices alone, beside a base that stays as it is.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

    from grpo_fast.policy import Policy

NamedTensors = Iterable[tuple[str, Tensor]]
Way = Literal["shared", "direct", "portable", "adapter"]


@dataclass(frozen=True)
class Placement:
    """A part of one weight, and the place in vLLM's memory that it was copied to."""

    name: str  # the checkpoint's
    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # into the weight, in elements

    def source(self, weight: Tensor) -> Tensor:
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)

    def holds(self, weight: Tensor) -> bool:
        """Whether vLLM holds exactly this weight here."""
        return torch.equal(self.target, self.source(weight).to(self.target))

    def aliases(self, weight: Tensor) -> bool:
        """Whether the weight and vLLM's tensor are the same memory."""
        source = self.source(weight)
        return source.data_ptr() == self.target.data_ptr() and source.stride() == self.target.stride()


class _Watcher(TorchDispatchMode):
    """Records what is copied out of the weight that was handed out last."""

    def __init__(self) -> None:
        super().__init__()
        self.placements: list[Placement] = []
        self._name = ""
        self._weight: Tensor | None = None

    def handing_out(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            self._name, self._weight = name, weight
            yield name, weight
        self._weight = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._weight is not None:
            target, source = args[:2]
            if storage_of(source) == storage_of(self._weight) and source.shape == target.shape:
                offset = source.storage_offset() - self._weight.storage_offset()
                place = Placement(self._name, target, tuple(source.shape), source.stride(), offset)
                self.placements.append(place)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def watch_loading(load: Callable[[NamedTensors], object], weights: NamedTensors) -> list[Placement]:
    """Load `weights` with the engine's own loader; returns where they went, in order."""
    with _Watcher() as watcher:
        load(watcher.handing_out(weights))
    return watcher.placements


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.inference_mode(False)  # a view made in an engine's inference mode could never be trained
@torch.no_grad()
def share(model: nn.Module, weights: Mapping[str, Tensor], placements: list[Placement]) -> list[Placement]:
    """Make engine and trainer use the same memory, where a whole weight is a contiguous part of a tensor.

    The trainer's weights become views of the engine's tensors; each keeps its identity, shape and value.

    Args:
        model: the engine's, its weights loaded and not yet processed.
        weights: the trainer's, live, by the checkpoint's names; they may wait on the host.

    Returns:
        The placements with their targets where they are now.
    """
    owners: dict[int, list[nn.Parameter]] = defaultdict(list)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[storage_of(parameter)].append(parameter)
    by_storage: dict[int, list[Placement]] = defaultdict(list)
    for place in placements:
        by_storage[storage_of(place.target)].append(place)
    loaded = Counter(place.name for place in placements)
    moved = {}
    for storage, parts in by_storage.items():
        whole = all(loaded[part.name] == 1 and _is_whole(part, weights.get(part.name)) for part in parts)
        if not (whole and _is_plain(owners[storage])):
            continue
        home = owners[storage][0].data
        home = home.clone() if home.is_inference() else home
        for part in parts:
            shape, start = weights[part.name].shape, part.target.storage_offset()
            view = home.view(-1)[start : start + part.target.numel()].view(shape)
            weights[part.name].data = view
            moved[part.name] = replace(part, target=view, size=tuple(shape), stride=view.stride())
        for owner in owners[storage]:
            owner.data = home
    return [moved.get(place.name, place) for place in placements]


def _is_plain(owners: Sequence[nn.Parameter]) -> bool:
    """One tensor, by however many names, that has its memory for itself."""
    return bool(owners) and all(
        owner.is_contiguous() and owner.storage_offset() == 0 and owner.shape == owners[0].shape
        for owner in owners
    )


def _is_whole(place: Placement, weight: Tensor | None) -> bool:
    """Whether a contiguous weight lies in as many contiguous elements of its dtype, as it is."""
    return (
        weight is not None
        and weight.is_contiguous()
        and place.target.is_contiguous()
        and (weight.numel(), weight.dtype) == (place.target.numel(), place.target.dtype)
        and place.holds(weight)  # a loader may go on where it has copied: -exp(A_log) of a Mamba layer
    )


def has_experts(policy: Policy) -> bool:
    return any(".experts." in name for name, _ in policy.base_model.named_parameters())


def publishes_otherwise(policy: Policy) -> bool:
    """Whether files of its type may have other names, or other tensors, than transformers has."""
    return has_experts(policy) or policy.base_model.config.model_type == "gemma3"


def checkpoint_weights(policy: Policy, *, adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights, adapters merged or left out, under the names that vLLM's loaders know.

    transformers fuses a layer's experts as it loads them; here they are copies, one by one again. gpt-oss
    publishes them fused, and vLLM reloads only those that come one by one. Qwen3-VL publishes them fused and
    transposed, which transformers undoes as it loads and does not do again. Gemma 3's tower has other names.
    """
    if not publishes_otherwise(policy):
        yield from policy.named_weights(adapters=adapters)
        return
    from transformers.core_model_loading import revert_weight_conversion

    kind = policy.base_model.config.model_type
    for name, tensor in policy.named_weights(adapters=adapters):
        before, experts, part = name.partition(".experts.")
        if experts and kind == "qwen3_vl_moe":
            yield name, tensor.transpose(1, 2)
        elif experts and kind == "gpt_oss":
            yield from ((f"{before}.experts.{index}.{part}", expert) for index, expert in enumerate(tensor))
        else:
            yield from revert_weight_conversion(policy.base_model, {name: tensor}).items()


def weight_versions(policy: Policy) -> tuple[int, ...]:
    """Changes with every in-place operation on a trained parameter that torch knows of: none on its rows."""
    return tuple(parameter._version for parameter in policy.trainable().values())


class WeightSync:
    """The policy's weights into vLLM, again and again; LoRA merged in float32, or as an adapter.

    Args:
        placements: where the loader of vLLM's `model` put the weights, after sharing.
        adapters: whether LoRA goes there as an adapter.

    Attributes:
        way: how weights get there, and `reason` why.
        adapter: what requests must name.
    """

    def __init__(
        self, engine: LLMEngine, model: nn.Module, policy: Policy, placements: list[Placement], adapters: bool
    ) -> None:
        self.adapter: LoRARequest | None = None
        self._engine = engine
        self._policy = policy
        self._placements: dict[str, list[Placement]] = defaultdict(list)
        for place in placements:
            self._placements[place.name].append(place)
        self.way: Way
        if adapters:
            self.way, self.reason = "adapter", "rollout.vllm.lora_sync = 'adapter'"
        else:
            self.way, self.reason = self._choose(model)
        if self.way == "portable":
            self._placements = self._left_out(model)
        elif self.way != "direct":
            self._placements.clear()  # of a weight that vLLM repacked they would keep the memory

    @torch.no_grad()
    def __call__(self, *, everything: bool) -> None:
        """Take over the weights. `everything`: also what training leaves alone, because vLLM dropped it."""
        if self.way == "adapter":
            self._send_adapter()
            return
        if self.way == "portable":
            self._reload()
        if not self._placements:
            return
        # What has other names in the policy is copied, whatever trains.
        everything = everything or self.way == "portable" or publishes_otherwise(self._policy)
        changing = self._policy.changing_weights()
        for name, weight in checkpoint_weights(self._policy):
            for place in self._placements[name] if everything or name in changing else ():
                if not place.aliases(weight):
                    place.target.copy_(place.source(weight))

    def _choose(self, model: nn.Module) -> tuple[Way, str]:
        """The cheapest way that reaches everything vLLM reads."""
        if self._policy.sharded:  # and looking at all weights would be an exchange that no rank may leave
            return "portable", "the policy's weights are sharded over ranks"
        if self._engine.model_config.use_mla:
            return "portable", "vLLM derives other weights from those of latent attention"
        if problem := self._misplaced(model, "loading"):
            return "portable", problem
        own = (
            name
            for name, weight in checkpoint_weights(self._policy)
            if not all(place.aliases(weight) for place in self._placements[name])
        )
        if (copied := next(own, None)) is None:
            return "shared", "every weight is the same memory in both"
        # The portable way must leave the same values at the same places, or it is the one to take.
        self._reload()
        if problem := self._misplaced(model, "vLLM's own reload"):
            return "portable", problem
        return "direct", f"{copied} has memory of its own in vLLM"

    @torch.no_grad()
    def _left_out(self, model: nn.Module) -> dict[str, list[Placement]]:
        """What vLLM's reload leaves as it was, by loaders that copy past it, as of gpt-oss's sinks."""
        read = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()}
        if not self._policy.sharded:
            read -= {storage_of(weight) for weight in self._policy.base_weights().values()}
        places = [
            place
            for found in self._placements.values()
            for place in found
            if storage_of(place.target) in read and place.target.is_floating_point()
        ]
        for place in places:
            place.target.fill_(torch.nan)
        self._reload()
        left: dict[str, list[Placement]] = defaultdict(list)
        for place in places:
            if place.target.isnan().any():
                left[place.name].append(place)
        return left

    def _misplaced(self, model: nn.Module, action: str) -> str | None:
        """Which weight vLLM does not hold as it is where its loader had copied it to."""
        used = {storage_of(t) for t in (*model.parameters(), *model.buffers()) if t.numel()}
        for name, weight in checkpoint_weights(self._policy):
            places = self._placements[name]
            if not places:
                return f"{name} is not loaded by plain copies"
            if not used.issuperset(storage_of(place.target) for place in places):
                return f"{name} is repacked after {action}"
            if not all(place.holds(weight) for place in places):
                return f"{name} is transformed after {action}"
        return None

    def _reload(self) -> None:
        self._engine.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": checkpoint_weights(self._policy)}
        )

    def _send_adapter(self) -> None:
        """As a new adapter each time, through a folder of a few MB, which every version of vLLM reads."""
        from vllm.lora.request import LoRARequest

        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        with tempfile.TemporaryDirectory(prefix="grpo-fast-adapter-") as folder:
            self._policy.model.save_pretrained(folder)
            request = LoRARequest(f"policy-{number}", number, folder)
            if self.adapter is not None:
                self._engine.remove_lora(self.adapter.lora_int_id)
            if not self._engine.add_lora(request):
                raise RuntimeError("vLLM did not take the adapter; set rollout.vllm.lora_sync to merged")
        self.adapter = request
