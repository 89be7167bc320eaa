"""NeMo-RL: our policy losses as its `LossFunction`, and its fused log-probabilities on our head.

In a run script, pass `PolicyLoss(GRPOLossConfig(...))` as `loss_fn` to `grpo_train`. With
`policy.megatron_cfg.use_linear_ce_fusion_loss=true`, `patch()` in the policy worker replaces the chunked
head. NeMo-RL's fused log-probabilities do not support temperature, top-k, top-p or packed sequences.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fast.head import linear_logprob
from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import Replacements
from grpo_fast.integrations.losses import padded_policy_loss, require_loss
from grpo_fast.objective import GRPOLossConfig, StepTotals

_NAMES = {  # NeMo-RL's, where it has them
    "kl": "kl_penalty",
    "policy/ratio_mean": "probs_ratio",
    "policy/ratio_min": "probs_ratio_min",
    "policy/ratio_max": "probs_ratio_max",
    "sampling/importance_ratio_mean": "sampling_importance_ratio",
    "sampling/kl": "gen_kl_error",
}
_patch = Replacements()


class PolicyLoss:
    """Compute one of our losses, built in or `module:function`, as NeMo-RL's `LossFunction`.

    The KL to the reference (`config.beta`) and the sampler corrections are ours; leave NeMo-RL's off.

    Args:
        config: the loss.
        use_fused_linear_logprobs: `policy.megatron_cfg.use_linear_ce_fusion_loss` of the run.
        exactly_on_policy: `loss_fn.force_on_policy_ratio` of the run, with which NeMo-RL passes zeros as the
            previous log-probabilities: they are not read.

    Raises:
        TypeError: `config` is not a configuration.
        ValueError: the loss needs the entropy, which NeMo-RL does not pass to a loss.
    """

    def __init__(
        self, config: GRPOLossConfig, use_fused_linear_logprobs: bool = False, exactly_on_policy: bool = False
    ) -> None:
        require_loss(config, "NeMo-RL", "entropy")
        interfaces = private("nemo_rl", "algorithms.loss.interfaces")
        self.config = config
        self.use_linear_ce_fusion = use_fused_linear_logprobs  # NeMo-RL's names, here and below
        self.force_on_policy_ratio = exactly_on_policy
        self.input_type = interfaces.LossInputType.LOGPROB
        per_token = config.is_custom or config.aggregation_kind == "token_mean"
        self.loss_type = getattr(interfaces.LossType, "TOKEN_LEVEL" if per_token else "SEQUENCE_LEVEL")

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss by NeMo-RL's protocol.

        Args:
            next_token_logprobs: (B, T − 1), differentiable.
            data: `advantages`, `prev_logprobs`, `generation_logprobs`, `token_mask` (B, T), `sample_mask`
                (B,), and `reference_policy_logprobs` where `config.beta` > 0.
            global_valid_seqs, global_valid_toks: () counts over the optimizer step.

        Returns:
            The loss (), and metrics that NeMo-RL sums over micro-batches.
        """
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        generation = data["generation_logprobs"][:, 1:]
        previous = None if self.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        reference = data["reference_policy_logprobs"][:, 1:] if self.config.needs_reference else None
        result = padded_policy_loss(
            self.config,
            mask,
            StepTotals(float(global_valid_toks), float(global_valid_seqs)),
            logprobs=next_token_logprobs,
            advantages=data["advantages"][:, 1:],
            old_logprobs=previous,
            ref_logprobs=reference,
            sampler_logprobs=generation,
        )
        # NeMo-RL sums all metrics but the minima and maxima that it knows.
        metrics = {
            _NAMES.get(name, name): value.item()
            for name, value in result.metrics.items()
            if name in _NAMES or not name.endswith(("_min", "_max"))
        }
        current = next_token_logprobs.detach()
        error = (generation - (current if previous is None else previous)).abs().exp()
        entropy = -(current - generation).exp() * current
        return result.loss, metrics | {
            "loss": result.loss.item(),
            "token_mult_prob_error": float(error[mask != 0].sum() / global_valid_toks),
            "approx_entropy": float(entropy[mask != 0].sum() / global_valid_toks),
            "num_valid_samples": float(data["sample_mask"].sum()),
        }


def patch() -> None:
    """Compute NeMo-RL's fused log-probabilities (Megatron) by `linear_logprob`. Idempotent."""
    model_utils = private("nemo_rl", "distributed.model_utils")
    unpatch()
    replaced = inspect.signature(model_utils.from_parallel_hidden_states_to_logprobs)
    ours = _with_tied_weight if "output_weight" in replaced.parameters else hidden_states_to_logprobs
    _patch.replace(model_utils, "from_parallel_hidden_states_to_logprobs", ours)


unpatch = _patch.close


def hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Replace `from_parallel_hidden_states_to_logprobs`.

    Args:
        tensor_parallel_hidden_states: (T/P, B, H), this rank's positions of P tensor-parallel ranks.
        output_weight_layer: (V/P, H), this rank's rows.
        target: (B, T) token ids, not shifted.
        runtime_gather_output, chunk_size, vocab_start_index, vocab_end_index: ignored.

    Returns:
        (B, T − 1) float32, of each next token.

    Raises:
        ValueError: context parallelism is on.
    """
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        raise ValueError("fused log-probabilities do not support context parallelism; set its size to 1")
    group = tp_group if dist.get_world_size(tp_group) > 1 else None
    hidden = tensor_parallel_hidden_states
    if group is not None:  # the head sums the gradient over the ranks, so each keeps its part
        parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, hidden.detach().contiguous(), group=group)
        parts[dist.get_rank(group)] = hidden
        hidden = torch.cat(parts)
    rows = hidden.transpose(0, 1)[:, :-1]
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return linear_logprob(rows, output_weight_layer, target[:, 1:], process_group=group).logprob


def _with_tied_weight(
    hidden: Tensor, layers_own: Tensor | None, output_weight: Tensor, *others: Any, **options: Any
) -> Tensor:
    """Take the arguments of NeMo-RL 0.6, among them the layer's own weight, None where it is tied."""
    return hidden_states_to_logprobs(hidden, output_weight, *others, **options)
