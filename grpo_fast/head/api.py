"""Hidden states to log-probabilities, divergences and losses, and back, without the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.head.checks import (
    IGNORE_INDEX,
    check_exact_kl,
    check_numbers,
    check_outputs,
    check_policy_loss,
    head_call,
    kl_call,
)
from grpo_fast.head.fused_loss import fused_policy_loss, fuses
from grpo_fast.head.operator import backend_on, head_statistics, row_divergence
from grpo_fast.head.outputs import GRPOLossOutput, HeadOutput, KLOutput
from grpo_fast.head.parallel import parallel_divergence, parallel_statistics
from grpo_fast.objective import GRPOLossConfig, LossInputs, StepTotals, policy_loss
from grpo_fast.objective.types import TOKEN_COLUMNS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from grpo_fast.head.call import HeadOptions, KLOptions

_DEFAULT_LOSS = GRPOLossConfig()
_SHARED = ("bias", "temperature", "logit_scale", "softcap", "tolerance", "seed", "process_group")
_DIFFERENTIABLE = frozenset({"logprob", "entropy", "logsumexp", "mean_logit"})


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    outputs: Sequence[str] = ("logprob",),
    **options: Unpack[HeadOptions],
) -> HeadOutput:
    """Compute the log-probability of each target without storing the logits.

    The logits are z = softcap·tanh((X Wᵀ + bias)·logit_scale/softcap) / temperature, in float32 (float64 for
    float64 inputs). Inputs of different dtypes are promoted, or cast to autocast's dtype if autocast is
    enabled. The log-sum-exp is float32, too: at logits near 1,400 its rounding changes gradients by 5e-5.
    Besides the results a GPU needs 300 MiB by default, 192 MiB and X in float32 for an exact gradient, or
    640 MiB for the exact gradient of a frozen weight.

    Args:
        hidden: (..., H), any strides.
        weight: (V, H), not a DTensor; gather it first if FSDP or ZeRO-3 has split it.
        targets: (...) int64 in [0, V), or `ignore_index` for tokens to skip, whose results are zero.
        bias: (V,).
        temperature: a positive number, or one per token in the targets' shape; not differentiable.
        logit_scale: positive factor of the logits, before the softcap (Cohere, Granite).
        softcap: bound of the logits (Gemma 2); None for no bound.
        outputs: what to return besides `logprob`: "entropy", "logsumexp", "mean_logit", "argmax_is_target",
            "log_sum_sq_probs". The first three are differentiable too.
        tolerance: root mean square error of the backward, in units of the error of rounding the logit
            gradient to bfloat16. None for 2.5; 0 for the exact, batch-invariant gradient. Above 0 small parts
            of the gradient are sampled and scaled up: the gradient is unbiased, and `certificate` has its
            error. Without kernels the gradient is always exact.
        seed: of the sampling, an integer in [0, 2^63). Calls with equal operands, targets and upstream
            gradients draw the same samples unless their seeds differ: give each step, micro-batch and rank
            another one. None: one seed for all.
        weight_grad: (V, H), any float dtype, an existing gradient like `weight.grad`: the backward adds the
            weight's gradient in place, summed in float32 and rounded once per backward. Autograd gets none
            for the weight, so hooks on it (DDP, FSDP, some optimizers) do not run.
        recompute: False keeps tokens · V elements of the inputs' dtype from the forward to the backward,
            which is then exact. Only kernels do, without a softcap, and not for gradients of the entropy or
            the mean logit.
        process_group: ranks that each hold a contiguous part of the vocabulary's rows, in rank order;
            `weight` and `bias` are this rank's part, all other arguments are equal on all ranks. Hidden
            gradients are summed.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range. Values of `targets` and
            `temperature` are checked on a CPU only; elsewhere a bad one makes its log-probability NaN.
    """
    wanted = check_outputs(outputs)
    call, shard = head_call(hidden, weight, targets, wanted, wanted & _DIFFERENTIABLE, **options)
    rows, certificate = head_statistics(call) if shard is None else parallel_statistics(call, shard)
    every = {"log_sum_sq_probs": rows.log_sum_sq} | rows._asdict()
    if "argmax_is_target" in wanted:
        every["argmax_is_target"] = (rows.target_logit >= rows.max_logit) & (call.targets >= 0)
    shaped = {name: every[name].reshape(targets.shape) for name in wanted | {"logprob"}}
    return HeadOutput(**shaped, certificate=certificate)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **options: Unpack[HeadOptions],
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of the head's logits without storing them.

        loss = (1 - s)·(-log p_target) + s·mean_v(-log p_v) + z_loss·logsumexp²

    Args:
        reduction: "mean" over the tokens that are not ignored (0 when all are), "sum", or "none".
        label_smoothing: s in [0, 1].
        z_loss: weight of the squared log-sum-exp (PaLM, arXiv 2204.02311, section 5).
        options: of `linear_logprob`.

    Returns:
        () or, for "none", the targets' shape with zero where ignored; float32, float64 for float64 inputs.

    Raises:
        TypeError, ValueError: as `linear_logprob`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    check_numbers(most=1, label_smoothing=label_smoothing)
    check_numbers(z_loss=z_loss)
    wanted = {"logprob"}
    if label_smoothing or z_loss:
        wanted.add("logsumexp")
    if label_smoothing:
        wanted.add("mean_logit")
    call, shard = head_call(hidden, weight, targets, wanted, wanted, **options)
    s, _ = head_statistics(call) if shard is None else parallel_statistics(call, shard)
    losses = -(1 - label_smoothing) * s.logprob
    if label_smoothing:
        losses = losses + label_smoothing * (s.logsumexp - s.mean_logit)
    if z_loss:
        losses = losses + z_loss * s.logsumexp.square()
    if reduction == "none":
        return losses.reshape(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (call.targets >= 0).sum().clamp(min=1)


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    **options: Unpack[KLOptions],
) -> KLOutput:
    """Compute the divergence of two heads' distributions per token: the exact KL, or a distillation loss.

    With p the student's softmax of `hidden` and `weight`, q the reference's:

        reverse   KL(p || q) = Σ p·(log p - log q)
        forward   KL(q || p)
        jsd       (1 - beta)·KL(p || m) + beta·KL(q || m),  m = (1 - beta)·p + beta·q   (arXiv 2306.13649)

    The reference gets no gradient. If one vocabulary is wider, its last entries are padding: they belong to
    neither distribution and get no gradient.

    Args:
        hidden: (..., H), any strides.
        weight: (V, H), whole; see `linear_logprob`. It may be `ref_weight` too.
        mask: (...) bool, True for tokens that count; the others may hold NaN.
        ref_hidden: (..., H') of the same tokens, without a gradient.
        ref_weight: (V, H'), the same tokens in the same order.
        direction: "reverse", "forward" or "jsd".
        beta: of "jsd", in [0, 1]. As in TRL, 0 is the forward and 1 the reverse KL.
        temperature: of both heads, a positive number, or one per token in the mask's shape.
        ref_temperature: the reference's; None for `temperature`.
        bias, logit_scale, softcap: as in `linear_logprob`; `ref_bias`, `ref_logit_scale` and `ref_softcap`
            are the reference's.
        topk: compare the reference's k likeliest entries, and all others together as one outcome (arXiv
            2608.14728), a lower bound of the divergence. None: all entries.
        tolerance, seed: as in `linear_logprob`, with the error of rounding estimated from half the l1 norm of
            each token's logit gradient. With `topk` or a process_group the gradient is exact.
        process_group: as in `linear_logprob`, the same part of both heads on each rank. Not with `topk`.

    Raises:
        TypeError, ValueError: as `linear_logprob`.
    """
    call, shard = kl_call(hidden, weight, mask, ref_hidden, ref_weight, **options)
    if shard is None:
        rows, certificate = row_divergence(call)
        divergence = rows.divergence
    else:
        divergence, certificate = parallel_divergence(call, shard)
    return KLOutput(divergence.reshape(mask.shape), certificate)


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    *,
    sequence_ids: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    loss_mask: Tensor | None = None,
    group_ids: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
    num_sequences: int | None = None,
    totals: StepTotals | None = None,
    config: GRPOLossConfig | None = None,
    entropy: bool = False,
    entropy_coef: float | None = None,
    **options: Unpack[HeadOptions],
) -> GRPOLossOutput:
    """Compute a policy loss of a packed batch: N completion tokens with the hidden states that predict them.

    Args:
        hidden: (N, H).
        weight: (V, H).
        targets: (N,) int64.
        advantages: (N,) float, normalized as the loss's paper says: see `help(GRPOLossConfig)`.
        sequence_ids: (N,) int64 in [0, num_sequences), contiguous for each sequence; checked on a CPU only.
        old_logprobs: (N,) the policy's log-probabilities before this step's updates; None: exactly on-policy.
        ref_logprobs: (N,) the reference model's; needed if `config.beta` > 0.
        ref_hidden: (N, H') the reference model's; with `ref_weight` it replaces `ref_logprobs` if
            `config.kl_estimator` is "exact". Its logits are scaled and capped like the policy's.
        ref_weight: (V, H').
        ref_bias: (V,).
        sampler_logprobs: (N,) the rollout engine's, for the mismatch metrics and corrections.
        loss_mask: (N,) bool, or zeros and ones, which is checked on a CPU only. None: all tokens count.
        group_ids: (N,) int64; completions of one prompt share a group.
        columns: (N,) each by name: for a custom loss, or any of `TOKEN_COLUMNS` not given otherwise.
        num_sequences: None counts the sequences in `sequence_ids` and renumbers them from 0, which
            synchronizes with a GPU. Give it there, to count sequences without tokens in this batch, or if a
            custom loss reads the ids.
        totals: `grpo_fast.StepTotals`, counts over the optimizer step, if this batch is only part of it.
        config: the loss and its constants; None for `GRPOLossConfig()`.
        entropy: return the entropy, also as a metric, even if the loss does not need it.
        entropy_coef: of the entropy bonus, in place of the configuration's.
        options: of `linear_logprob`.

    Raises:
        TypeError, ValueError: as `linear_logprob`, or an input that the loss needs is missing.
    """
    config = _DEFAULT_LOSS if config is None else config
    named = {
        "advantages": advantages, "sequence_ids": sequence_ids, "loss_mask": loss_mask,
        "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "sampler_logprobs": sampler_logprobs,
        "group_ids": group_ids,
    }  # fmt: skip
    others = {**(columns or {}), **{name: values for name, values in named.items() if values is not None}}
    known: dict[str, Any] = {name: others.pop(name, None) for name in TOKEN_COLUMNS}
    reference: dict[str, Any] = {"ref_hidden": ref_hidden, "ref_weight": ref_weight, "ref_bias": ref_bias}
    check_policy_loss(hidden, targets, known, num_sequences, config, totals, entropy_coef)
    check_exact_kl(reference, config, known, options)
    ignore_index = options.get("ignore_index", IGNORE_INDEX)
    counted, loss_mask = targets != ignore_index, known.pop("loss_mask")
    loss_mask = counted if loss_mask is None else loss_mask.bool() & counted
    targets = torch.where(loss_mask, targets, ignore_index)
    needs_entropy = config.needs_entropy or config.is_custom or bool(entropy_coef)
    wanted = {"logprob", "entropy"} if entropy or needs_entropy else {"logprob"}
    differentiable = wanted if needs_entropy else {"logprob"}
    call, shard = head_call(hidden, weight, targets, wanted, differentiable, **options)
    rows, certificate = head_statistics(call) if shard is None else parallel_statistics(call, shard)
    token_entropy = rows.entropy if "entropy" in wanted else None
    if token_entropy is not None and not needs_entropy:
        token_entropy = token_entropy.detach()
    exact_kl = None
    if config.needs_exact_kl:
        shared: dict[str, Any] = {name: value for name, value in options.items() if name in _SHARED}
        ours = {"ref_logit_scale": "logit_scale", "ref_softcap": "softcap"}
        shared |= {name: shared[own] for name, own in ours.items() if own in shared}
        exact_kl = linear_kl(hidden, weight, loss_mask, **reference, **shared).divergence
    if num_sequences is None:  # ids may have gaps
        ids = known["sequence_ids"]
        known["sequence_ids"] = ids = (ids.diff(prepend=ids[:1]) != 0).cumsum(0)
        num_sequences = int(ids[-1]) + 1 if ids.numel() else 0
    inputs = LossInputs(
        logprobs=rows.logprob,
        loss_mask=loss_mask,
        exact_kl=exact_kl,
        num_sequences=num_sequences,
        entropy=token_entropy,
        totals=totals,
        columns=others,
        **known,
    )
    backend = backend_on(call.hidden.device.type, call.hidden.device.index, call.hidden.dtype)
    fused = backend == "triton" and fuses(inputs, config)
    result = (fused_policy_loss if fused else policy_loss)(inputs, config, entropy_coef)
    return GRPOLossOutput(
        loss=result.loss,
        metrics=result.metrics,
        logprobs=rows.logprob.detach(),
        entropy=None if token_entropy is None else token_entropy.detach(),
        certificate=certificate,
    )
