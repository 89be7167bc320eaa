"""The policy's weights into vLLM, by the cheapest way that was seen to work when the engine started.

- shared: they are the same memory; nothing is sent.
- direct: the copies that loading made are made again, into vLLM's tensors, for what training changes.
- portable: vLLM's `reload_weights`, everything: right for any layout, packed and quantised ones too.
- adapter: LoRA's matrices alone, under a new number each time, beside a base that stays as it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from grpo_fast.rollout.vllm.layout import Landing, live

if TYPE_CHECKING:
    from grpo_fast.policy import Policy

Way = Literal["shared", "direct", "portable"]


class Sync(Protocol):
    """Takes over the policy's weights. `way` and `reason` say how and why so."""

    way: str
    reason: str
    adapter: Any  # what requests must name; none without adapters

    def __call__(self, policy: Policy, *, everything: bool) -> None:
        """`everything`: what training leaves alone too, because vLLM has dropped it."""
        ...


def has_experts(policy: Policy) -> bool:
    return any(".experts." in name for name, _ in policy.base_model.named_parameters())


def checkpoint_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights under the names that vLLM's loaders know.

    transformers fuses a layer's experts as it loads them; here they are copies, one by one again.
    """
    if not has_experts(policy):
        yield from policy.named_weights()
        return
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in policy.named_weights():
        yield from revert_weight_conversion(policy.base_model, {name: tensor}).items()


def base_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint without its adapters; a tied head is not repeated."""
    seen: set[int] = set()
    for name, tensor in policy.base_model.state_dict(keep_vars=True).items():
        if ".lora_" not in name and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name.replace(".base_layer.", "."), tensor.detach()


def base_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """Parameters by the checkpoint's names, without adapters."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in policy.base_model.named_parameters()
        if ".lora_" not in name
    }


def changing(policy: Policy) -> set[str]:
    """The checkpoint's names of what training changes, adapters counted as merged."""
    names = (name.removeprefix("base_model.model.") for name in policy.trainable())
    return {
        f"{name.partition('.lora_')[0]}.weight" if ".lora_" in name else name.replace(".base_layer.", ".")
        for name in names
    }


def fingerprint(policy: Policy) -> tuple[int, ...]:
    """Changes with every in-place operation on a trained parameter that torch knows of."""
    return tuple(parameter._version for parameter in policy.trainable().values())


class MergedSync:
    """Full fine-tuning, and LoRA merged in float32, one layer at a time, the policy left as it is.

    Args:
        engine: vLLM's `LLMEngine`.
        model: the model inside it.
        landings: where its loader put the weights, after sharing.
    """

    adapter = None

    def __init__(self, engine: Any, model: nn.Module, policy: Policy, landings: list[Landing]) -> None:
        self._engine = engine
        self._packed_ties = packed_ties(model)
        # Experts have other names in the policy: all of them are copied, whatever trains.
        self._changing = None if has_experts(policy) else changing(policy)
        self._landings = live(model, landings)
        self.way, self.reason = choose_way(policy, landings, self._landings)
        if engine.model_config.use_mla:
            self.way, self.reason = "portable", "vLLM derives other weights from those of latent attention"
        if self.way == "direct":
            self._check_against_reload(model, policy)

    def __call__(self, policy: Policy, *, everything: bool) -> None:
        if self.way == "portable":
            self._reload(policy)
        elif self.way == "direct":
            self._copy(policy, None if everything else self._changing)

    @torch.no_grad()
    def _copy(self, policy: Policy, names: set[str] | None) -> None:
        due = grouped(part for part in self._landings if names is None or part.name in names)
        for name, weight in checkpoint_weights(policy):
            for landing in due.get(name, ()):
                if not landing.aliases(weight):
                    landing.load(weight)

    def _reload(self, policy: Policy) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": checkpoint_weights(policy)})
        for module in self._packed_ties:
            module.quant_method.process_weights_after_loading(module)

    def _check_against_reload(self, model: nn.Module, policy: Policy) -> None:
        """The portable way must leave the same values at the same places, or it is the one to take."""
        self._reload(policy)
        if len(live(model, self._landings)) < len(self._landings):
            self.way, self.reason = "portable", "vLLM's own reload moves the weights"
            return
        parts = grouped(self._landings)
        for name, weight in checkpoint_weights(policy):
            if not all(part.holds(weight) for part in parts[name]):
                self.way, self.reason = "portable", f"vLLM's own reload leaves other values in {name}"
                return


def grouped(landings: Iterable[Landing]) -> dict[str, list[Landing]]:
    """By the name of their weight."""
    groups: dict[str, list[Landing]] = {}
    for landing in landings:
        groups.setdefault(landing.name, []).append(landing)
    return groups


def choose_way(policy: Policy, landings: list[Landing], alive: list[Landing]) -> tuple[Way, str]:
    """Compare each of the policy's weights with what the engine holds, tensor by tensor."""
    held = {id(landing) for landing in alive}
    by_name = grouped(landings)
    shared = True
    reason = "every weight is the same memory in both"
    for name, weight in checkpoint_weights(policy):
        parts = by_name.get(name, [])
        if not parts:
            return "portable", f"{name} is not loaded by plain copies"
        if not all(id(part) in held for part in parts):
            return "portable", f"{name} is repacked after loading"
        if not all(part.holds(weight) for part in parts):
            return "portable", f"{name} is transformed after loading"
        if shared and not all(part.aliases(weight) for part in parts):
            shared, reason = False, f"{name} has memory of its own in vLLM"
    return ("shared", reason) if shared else ("direct", reason)


def packed_ties(model: nn.Module) -> list[nn.Module]:
    """Modules with a packed copy, as CPUs use, of a weight that is loaded under another module's name.

    vLLM's reload packs again where it loads; a head tied to the embedding it would leave as it was.
    """
    seen: set[int] = set()
    ties = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.numel():
            if id(weight) in seen and hasattr(module, "cpu_linear"):
                ties.append(module)
            seen.add(id(weight))
    return ties


class AdapterSync:
    """LoRA's matrices as a new adapter each time; vLLM keeps the base it was started with.

    The adapter goes through a folder of safetensors, a few MB, which every version of vLLM reads.
    """

    way = "adapter"
    reason = "rollout.vllm.lora_sync = 'adapter'"

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.adapter: Any = None

    def __call__(self, policy: Policy, *, everything: bool) -> None:
        from vllm.lora.request import LoRARequest

        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        with tempfile.TemporaryDirectory(prefix="grpo-fast-adapter-") as folder:
            policy.model.save_pretrained(folder)
            request = LoRARequest(f"policy-{number}", number, str(Path(folder)))
            if self.adapter is not None:
                self._engine.remove_lora(self.adapter.lora_int_id)
            if not self._engine.add_lora(request):
                raise RuntimeError("vLLM did not take the adapter; set rollout.vllm.lora_sync to merged")
        self.adapter = request
