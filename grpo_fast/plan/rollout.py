"""What generating holds besides the policy: keys and values, logits, the engine's own."""

from __future__ import annotations

from grpo_fast.plan.devices import GIB
from grpo_fast.plan.model_shape import BLOCK_TOKENS, ModelShape
from grpo_fast.plan.setup import Setup, Workload
from grpo_fast.plan.timeline import Timeline

ENGINE_RESIDUE = int(0.4 * GIB)
"""Of vLLM, awake or asleep: graphs, handles. Seen on an H200 with vLLM 0.26 and Qwen2.5-1.5B's shape."""

_LARGE_GPU = 70 * GIB  # from here on vLLM takes the larger of its two defaults
_BATCHED_TOKENS = (8192, 16384)  # tokens of one forward of vLLM
_SEQUENCES = (256, 1024)
_SAMPLER_COPIES = 3  # of float32 logits in vLLM's sampler: logits, probabilities, sorted or masked ones
_DRAW_COPIES = 4  # of a slice of float32 logits in ours


def vllm_bytes(setup: Setup, shape: ModelShape, work: Workload, forward: Timeline) -> dict[str, int]:
    """vLLM awake, with every completion of a step in flight."""
    large = setup.device.total >= _LARGE_GPU
    sequences = min(setup.max_sequences or _SEQUENCES[large], work.completions)
    prefill = forward.live(min(_BATCHED_TOKENS[large], work.prompts * work.prompt_length), 0, {}).max()
    sampler = 4 * _SAMPLER_COPIES * sequences * shape.vocabulary
    base = shape.bytes - 4 * shape.parameters.get("adapters", 0)
    return {
        "engine weights": 0 if setup.shares_weights else base,
        "KV cache": setup.kv_cache_bytes or paged_kv_bytes(shape, work),
        "engine workspace": int(prefill) + sampler,
        "engine residue": ENGINE_RESIDUE,
    }


def paged_kv_bytes(shape: ModelShape, work: Workload) -> int:
    """Pages for every completion of a step at its longest: none is preempted. Full pages of a prompt are
    shared by its group."""
    shared = work.prompt_length // BLOCK_TOKENS
    own = -(-work.sequence_length // BLOCK_TOKENS) - shared
    pages = work.prompts * (shared + work.generations * own) + 1  # one that stands for "none"
    return pages * BLOCK_TOKENS * shape.paged_kv_bytes_per_token


def transformers_bytes(setup: Setup, shape: ModelShape, work: Workload, forward: Timeline) -> dict[str, int]:
    """Our own engine at the end of its longest batch, when the cache is full."""
    prompts, rows = in_flight(setup, shape, work)
    cache = transformers_kv_bytes(setup, shape, work, prompts, rows)
    prefill = forward.live(prompts * work.prompt_length, prompts, {}).max()
    prefill += shape.itemsize * prompts * shape.vocabulary
    scores = 4 * rows * shape.heads * (work.prompt_length + 2 * work.completion_length)
    slice_of = min(rows * shape.vocabulary, _draw_slice(setup))
    decode = rows * shape.vocabulary * shape.itemsize + 4 * _DRAW_COPIES * slice_of + scores
    return {"KV cache": cache, "engine workspace": max(int(prefill), decode)}


def transformers_kv_bytes(setup: Setup, shape: ModelShape, work: Workload, prompts: int, rows: int) -> int:
    """Of `rows` completions of `prompts` prompts, buffers that grow by copying included."""
    if not shares_prefix(shape, setup):
        return rows * shape.kv_bytes(work.sequence_length)
    itemsize = 4 if setup.device.kind == "cpu" else shape.itemsize  # CPUs decode in float32
    numbers = sum(layer.numbers for layer in shape.layers)
    growing = rows * max(layer.numbers for layer in shape.layers) * work.completion_length // 2
    tokens = prompts * work.prompt_length + rows * work.completion_length
    return itemsize * (tokens * numbers + growing)


def in_flight(setup: Setup, shape: ModelShape, work: Workload) -> tuple[int, int]:
    """(prompts, completions) that the transformers engine decodes at once."""
    from grpo_fast.rollout.transformers import CPU_BATCH_TOKENS

    def held(rows: int) -> int:
        prompts = -(-rows // work.generations)
        if shares_prefix(shape, setup):
            return prompts * work.prompt_length + rows * work.completion_length
        return rows * work.sequence_length

    budget = setup.max_batch_tokens
    if budget is None and setup.device.kind == "cpu":
        budget = max(CPU_BATCH_TOKENS, held(1))
    rows = work.completions
    if budget is not None and held(rows) > budget:
        rows = max(1, max((r for r in range(1, rows) if held(r) <= budget), default=1))
    return -(-rows // work.generations), rows


def shares_prefix(shape: ModelShape, setup: Setup) -> bool:
    """As `SharedPrefixDecoder.supports`: plain full attention in every layer."""
    capped = getattr(setup.config.get_text_config(), "attn_logit_softcapping", None)
    return all(layer.window is None for layer in shape.layers) and not capped


def _draw_slice(setup: Setup) -> int:
    from grpo_fast.rollout.sampling import SLICE, SLICE_ELSEWHERE

    return SLICE.get(setup.device.kind, SLICE_ELSEWHERE)
