"""Convert sampling parameters, prompts and completions to and from vLLM's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.data.images import opened
from grpo_fast.data.text import completion_texts
from grpo_fast.rollout.types import Completion, Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

    from grpo_fast.data.images import PromptImages
    from grpo_fast.policy import Policy

COMPARED_TOKENS = 2000


def params_of(policy: Policy, sampling: Sampling) -> SamplingParams:
    """Return vLLM's sampling parameters for one completion."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
        max_tokens=sampling.max_completion_length,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        stop_token_ids=list(policy.eos_token_ids),
        ignore_eos=True,  # `stop_token_ids` names them all
        logprobs=0 if sampling.logprobs else None,  # 0: of the sampled token only
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop text may be a special token
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def content_of(policy: Policy, prompt: Sequence[int], images: PromptImages | None = None) -> Any:
    """Return vLLM's prompt; with images vLLM inserts their tokens itself."""
    if images is None:
        return {"prompt_token_ids": list(prompt)}
    ids = policy.tokenizer(images.text, add_special_tokens=False)["input_ids"]
    shown = [opened(image) for image in images.images]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": shown}}


def completion_of(policy: Policy, output: Any, tells_experts: bool) -> Completion:
    """Return the completion of vLLM's output.

    Raises:
        FloatingPointError: a log-probability is not a number.
        RuntimeError: vLLM returns other experts than the policy has.
    """
    sampled = output.outputs[0]
    token_ids = tuple(sampled.token_ids)
    logprobs = None if sampled.logprobs is None else tuple(sampled.logprobs.logprobs)
    if not all(-float("inf") < logprob <= 0.0 for logprob in logprobs or ()):
        raise FloatingPointError(
            "vLLM sampled from logits that hold NaN or infinity: the weights have likely diverged"
        )
    (text,) = completion_texts(policy.tokenizer, [token_ids], policy.eos_token_ids)
    experts = _experts_of(policy, output) if tells_experts else None
    return Completion(token_ids, logprobs, text, sampled.finish_reason == "length", experts=experts)


def _experts_of(policy: Policy, output: Any) -> Any:
    """Return the (t, L, k) experts of all tokens but the last."""
    sampled = output.outputs[0]
    found, read = sampled.routed_experts, len(output.prompt_token_ids) + len(sampled.token_ids) - 1
    layout = None if policy.routing is None else policy.routing.shape
    shape = None if found is None else found.shape
    if shape is None or shape[0] < read or layout not in (None, shape[1:]):
        raise RuntimeError(
            f"vLLM returns experts of shape {shape} for {read} tokens, but the policy's layers and experts "
            f"are {layout}; set rollout.router_replay to false"
        )
    return found[:read].astype("int16")


def require_same_tokenizer(ours: Any, theirs: Any) -> None:
    """Raise ValueError if vLLM, which finds stop strings, decodes differently from the policy."""
    ids = list(range(min(len(ours), COMPARED_TOKENS)))
    if ours.decode(ids) != theirs.decode(ids):
        raise ValueError(
            f"vLLM's {type(theirs).__name__} decodes differently from the policy's {type(ours).__name__} and "
            "would miss rollout.stop; leave stop out, or set rollout.engine to transformers"
        )
