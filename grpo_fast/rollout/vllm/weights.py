"""Find where each weight of a checkpoint lies in vLLM's model, and send new values there.

vLLM fuses weights (q, k and v; gate and up), pads vocabularies, slices for tensor parallelism and sometimes
repacks. Every loader ends in `Tensor.copy_`. Watching these copies shows for any architecture which part of
which weight went where, and that decides the cheapest way to send new values:

- shared: no copy; the trainer's parameter is a view of vLLM's tensor.
- direct: repeat the loader's copies for the weights that training changes.
- portable: vLLM's `reload_weights` of everything, for any layout.
- adapter: LoRA's matrices only; the base stays as it is.
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
    """A part of a weight, and vLLM's tensor that it was copied to."""

    name: str  # in the checkpoint
    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # into the weight, in elements

    def source(self, weight: Tensor) -> Tensor:
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)

    def holds(self, weight: Tensor) -> bool:
        """Return whether vLLM's tensor equals this weight."""
        return torch.equal(self.target, self.source(weight).to(self.target))

    def aliases(self, weight: Tensor) -> bool:
        """Return whether the weight and vLLM's tensor are the same memory."""
        source = self.source(weight)
        return source.data_ptr() == self.target.data_ptr() and source.stride() == self.target.stride()


class _Watcher(TorchDispatchMode):
    """Records copies from the weight that was handed out last."""

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
    """Load `weights` with vLLM's loader, and return where they went, in order."""
    with _Watcher() as watcher:
        load(watcher.handing_out(weights))
    return watcher.placements


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.inference_mode(False)  # views made in inference mode cannot be trained
@torch.no_grad()
def share(model: nn.Module, weights: Mapping[str, Tensor], placements: list[Placement]) -> list[Placement]:
    """Make the trainer's weights views of vLLM's tensors, where a whole weight is a contiguous part of one.

    vLLM's `model` is loaded but not yet post-processed. Weights may be on the host. Returns the placements
    with their new targets.
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
    """Return whether the owners of a storage are one whole tensor, under any number of names."""
    return bool(owners) and all(
        owner.is_contiguous() and owner.storage_offset() == 0 and owner.shape == owners[0].shape
        for owner in owners
    )


def _is_whole(place: Placement, weight: Tensor | None) -> bool:
    """Return whether the target is the whole weight, contiguous and of equal dtype and values."""
    return (
        weight is not None
        and weight.is_contiguous()
        and place.target.is_contiguous()
        and (weight.numel(), weight.dtype) == (place.target.numel(), place.target.dtype)
        and place.holds(weight)  # a loader may change its copy: -exp(A_log) of a Mamba layer
    )


def has_experts(policy: Policy) -> bool:
    return any(".experts." in name for name, _ in policy.base_model.named_parameters())


def publishes_otherwise(policy: Policy) -> bool:
    """Return whether checkpoints of this type may differ from transformers in names or tensors."""
    return has_experts(policy) or policy.base_model.config.model_type == "gemma3"


def checkpoint_weights(policy: Policy, *, adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the policy's weights, adapters merged or left out, under the names that vLLM's loaders know.

    transformers fuses a layer's experts when loading; here they are split again. vLLM also reloads those of
    gpt-oss only one by one. Qwen3-VL publishes experts transposed. Gemma 3's vision tower has other names.
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
    """Return the parameters' version counters, which change in place with them, but not with local shards."""
    return tuple(parameter._version for parameter in policy.trainable().values())


class WeightSync:
    """Sends the policy's weights to vLLM; LoRA merged in float32, or as an adapter.

    `placements` are those of vLLM's loader, after sharing. `way` is how weights are sent, `reason` why, and
    `adapter` what requests must name.
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
            self._placements.clear()  # they would keep the memory of a weight that vLLM repacked

    @torch.no_grad()
    def __call__(self, *, everything: bool) -> None:
        """Send the weights; `everything`: also frozen ones, which vLLM dropped."""
        if self.way == "adapter":
            self._send_adapter()
            return
        if self.way == "portable":
            self._reload()
        if not self._placements:
            return
        # `changing_weights` has the policy's names.
        everything = everything or self.way == "portable" or publishes_otherwise(self._policy)
        changing = self._policy.changing_weights()
        for name, weight in checkpoint_weights(self._policy):
            for place in self._placements[name] if everything or name in changing else ():
                if not place.aliases(weight):
                    place.target.copy_(place.source(weight))

    def _choose(self, model: nn.Module) -> tuple[Way, str]:
        """Return the cheapest way that reaches all weights that vLLM reads, and the reason."""
        if self._policy.sharded:  # reading all weights would be a collective
            return "portable", "the policy's weights are sharded over ranks"
        if self._engine.model_config.use_mla:
            return "portable", "vLLM derives weights from those of latent attention"
        if problem := self._misplaced(model, "loading"):
            return "portable", problem
        copies = (
            name
            for name, weight in checkpoint_weights(self._policy)
            if not all(place.aliases(weight) for place in self._placements[name])
        )
        if (copied := next(copies, None)) is None:
            return "shared", "all weights share memory"
        # If a reload changes anything, plain copies would miss what vLLM derives from the weights.
        self._reload()
        if problem := self._misplaced(model, "vLLM's own reload"):
            return "portable", problem
        return "direct", f"vLLM has a copy of {copied}"

    @torch.no_grad()
    def _left_out(self, model: nn.Module) -> dict[str, list[Placement]]:
        """Return the placements that vLLM's reload leaves out, such as gpt-oss's sinks."""
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
        """Return why a weight is not where vLLM's loader has copied it to, or None."""
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
        """Load a new adapter each time, through a folder, which every version of vLLM reads."""
        from vllm.lora.request import LoRARequest

        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        with tempfile.TemporaryDirectory(prefix="grpo-fast-adapter-") as folder:
            self._policy.model.save_pretrained(folder)
            request = LoRARequest(f"policy-{number}", number, folder)
            if self.adapter is not None:
                self._engine.remove_lora(self.adapter.lora_int_id)
            if not self._engine.add_lora(request):
                raise RuntimeError("vLLM refused the adapter; set rollout.vllm.lora_sync to merged")
        self.adapter = request
