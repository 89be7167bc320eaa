"""Tiny models, a tokenizer over letters, and what it takes to run vLLM for real."""

from __future__ import annotations

import gc
import os
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_fast.policy import load_policy
from grpo_fast.policy.config import ModelConfig
from grpo_fast.rollout.config import VLLMConfig

SHAPE = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # peaked enough that sampling has a shape to get wrong
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# vLLM's attention on a CPU wants heads of at least 32.
SERVED = SHAPE | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
ENDS = [1, 5]  # tokens that end a completion of `saved_model`
OWN = {"attn_implementation": "eager"}  # transformers' SDPA leaves Gemma 2's softcap out
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
EXPERTS |= {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
LOCAL = ["sliding_attention"] * 2 + ["full_attention"]
MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
MIXED |= {"initializer_range": 0.1}  # with more, their rounding grows
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}


def made(family: str, **sizes: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | sizes), **OWN)


MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)),
    "gemma2": lambda: made("gemma2", attn_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=6),
    "deepseek_v3": lambda: made("deepseek_v3", **LATENT | EXPERTS),
    "hrm_text": lambda: made(
        "hrm_text", initializer_range=0.1
    ),  # which runs through its layers several times, each with a cache
    "diffllama": lambda: made("diffllama"),
    "qwen3_next": lambda: made("qwen3_next", **EXPERTS | DELTA | MIXED, shared_expert_intermediate_size=16),
    "qwen3_5_text": lambda: made("qwen3_5_text", **DELTA | MIXED),
    "olmo_hybrid": lambda: made("olmo_hybrid", **DELTA | MIXED),
    "kimi_linear": lambda: made(
        "kimi_linear", **LATENT | EXPERTS | MIXED, linear_head_dim=8, linear_num_heads=4
    ),
    "bamba": lambda: made("bamba", **MAMBA, attn_layer_indices=[1]),
    "nemotron_h": lambda: made(
        "nemotron_h",
        **EXPERTS,
        layer_types=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        num_hidden_layers=4,
    ),
    "falcon_h1": lambda: made("falcon_h1", **MAMBA, mamba_d_ssm=64),
    "zamba2": lambda: made(
        "zamba2",
        layers_block_type=["linear_attention", "hybrid"] * 2,
        initializer_range=0.1,
        num_hidden_layers=4,
        num_key_value_heads=4,
        head_dim=16,
        n_mamba_heads=8,
        mamba_d_state=8,
        chunk_size=8,
    ),
    "lfm2": lambda: made(
        "lfm2",
        layer_types=["conv", "full_attention"] * 2,
        num_hidden_layers=4,
        block_auto_adjust_ff_dim=False,
    ),
    "zaya": lambda: made("zaya", initializer_range=0.1),
    "jamba": lambda: made("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, num_experts=1),
    "minimax": lambda: made("minimax", **EXPERTS | MIXED, block_size=8),
    "mamba": lambda: made("mamba", state_size=8),
    "mamba2": lambda: made("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8),
    "xlstm": lambda: made("xlstm", hidden_size=128, num_heads=4, head_dim=None),
    "rwkv": lambda: made("rwkv", attention_hidden_size=32),
    "xlm": lambda: made("xlm", causal=True),  # which takes token 2 for padding
    "recurrent_gemma": lambda: made(
        "recurrent_gemma",
        block_types=["recurrent", "attention"],
        num_key_value_heads=1,
        lru_width=32,
        attention_window_size=6,
    ),
    "deepseek_v2": lambda: made("deepseek_v2", **LATENT | EXPERTS, first_k_dense_replace=1),
    "glm4_moe_lite": lambda: made("glm4_moe_lite", **LATENT | EXPERTS),
    "longcat_flash": lambda: made(
        "longcat_flash",
        **LATENT | EXPERTS,
        num_layers=2,
        ffn_hidden_size=32,
        expert_ffn_hidden_size=16,
        zero_expert_num=2,
        moe_topk=2,
    ),
    "minicpm3": lambda: made("minicpm3", **LATENT),
    "unequal": lambda: made("youtu", **LATENT | {"v_head_dim": 6}),
    "youtu": lambda: made("youtu", **LATENT),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=6, layer_types=LOCAL)),
}


@pytest.fixture
def seed(seed: int) -> int:
    """Of torch's global generator too, from which models take their weights."""
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def family_model(seed: int) -> Callable[[str], PreTrainedModel]:
    return lambda family: MAKERS[family]().eval()


@pytest.fixture
def model(seed: int) -> PreTrainedModel:
    return MAKERS["llama"]().eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Tokens 3 to 28 are the letters; 29 is two of them at once."""
    vocabulary = ["<bos>", "<eos>", "<pad>", *string.ascii_lowercase, "xy"]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


@pytest.fixture(scope="session")
def saved_model(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Path]:
    """Save a random model that vLLM takes. Its head, tied or not, has fewer rows than vLLM pads it to."""

    def save(*, tied: bool = True, heads: int = 1, own: PreTrainedTokenizerFast | None = None) -> Path:
        folder, speaks = tmp_path_factory.mktemp("served"), own or tokenizer
        names = {name: getattr(speaks, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        shape = SERVED | names | {"vocab_size": len(speaks), "num_key_value_heads": heads}
        with torch.random.fork_rng():
            print(f"seed {torch.seed() % 2**31}")
            config = LlamaConfig(**shape, tie_word_embeddings=tied, attention_bias=True)
            model = LlamaForCausalLM(config)
        if own is None:
            model.generation_config.eos_token_id = ENDS
        model.save_pretrained(folder)
        speaks.save_pretrained(folder)
        return folder

    return save


_MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 16},
}
_SERVED_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
SERVED_KINDS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True},  # padded to 64
    "granitemoehybrid": _MAMBA | _SERVED_MIXED | {"num_local_experts": 4, "shared_intermediate_size": 64},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "nemotron_h": {
        **{"layer_types": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3},
        **{"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16},
    },
}


@pytest.fixture
def saved_kind(tmp_path, saved_model, tokenizer, seed):
    """Save a random model of a kind that vLLM takes on a CPU, and give its folder."""

    def save(kind: str):
        shape = AutoConfig.from_pretrained(saved_model(tied=False)).to_dict()
        kept = {n: v for n, v in shape.items() if n not in ("model_type", "architectures", "attention_bias")}
        sizes = kept | {"num_experts_per_tok": 2, "intermediate_size": 96} | SERVED_KINDS[kind]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.fixture(scope="module")
def on_vllms_cpu() -> Iterator[None]:
    """Skips where vLLM is missing, or built for something else than the CPU.

    Its starts and stops don't search for garbage, which would take most of their time.
    """
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip(f"vLLM is built for {current_platform.device_type}, not for the CPU")
    with patch.object(gc, "collect", lambda generation=2: 0):
        yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def plain_layouts(on_vllms_cpu: None) -> Callable[[], AbstractContextManager]:
    """vLLM on a CPU keeps its weights as it does on a GPU, whatever it would pack them for."""
    from vllm.model_executor.layers import utils

    def plain(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    return lambda: patch.object(utils, "dispatch_cpu_unquantized_gemm", plain)


@pytest.fixture
def amx(on_vllms_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs small weights as on a CPU with AMX. Without AVX-512's bfloat16 its kernels abort."""
    from vllm.model_executor.layers import utils

    switched_off = "ONEDNN_MAX_CPU_ISA" in os.environ
    packs = hasattr(torch.ops._C, "convert_weight_packed") and torch.cpu._is_avx512_bf16_supported()
    if switched_off or not packs:
        pytest.skip("vLLM's kernels for weights packed for AMX need AVX-512 for bfloat16")
    chosen = utils.check_cpu_sgl_kernel

    def chosen_with_amx(*weight: object) -> bool:
        with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):  # attention asks, too
            return chosen(*weight)

    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", chosen_with_amx)


@pytest.fixture(scope="module")
def running_vllm(plain_layouts: Callable) -> Callable[..., AbstractContextManager]:
    """`with running_vllm(folder, dtype=…, plain=…) as (engine, policy)`: `plain` as under `plain_layouts`."""

    @contextmanager
    def running(
        folder: Path, *, dtype: str, plain: bool, lora=None, head: bool = True, bits=None, **settings
    ) -> Iterator:
        from grpo_fast.rollout.vllm.engine import VLLMEngine

        own = {"lora": lora, "train_lm_head": head, "quantization": bits}
        model = ModelConfig(path=str(folder), dtype=dtype, device="cpu", **own)
        policy, config = load_policy(model), VLLMConfig(kv_cache_gib=0.05, **settings)
        with (
            plain_layouts() if plain else nullcontext(),
            VLLMEngine(policy, config, max_length=256) as engine,
        ):
            yield engine, policy

    return running


@pytest.fixture(name="largest_difference")
def largest_difference_fixture() -> Callable[..., float]:
    return largest_difference


def largest_difference(policy, prompts: Sequence, groups: Sequence, temperature: float = 1.0) -> float:
    """Nats between reported log-probabilities and those of a full forward of the policy."""
    worst = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion.token_ids]], device=policy.device)
            with torch.no_grad():
                logits = policy.base_model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            logprobs = (logits / temperature).log_softmax(-1).cpu()
            expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            worst = max(worst, (expected - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


@pytest.fixture
def shake() -> Callable[..., None]:
    """What an optimiser step does to a policy, but for the direction."""

    @torch.no_grad()
    def shake(policy, scale: float = 0.05) -> None:
        for parameter in policy.trainable().values():
            parameter.add_(scale * torch.randn_like(parameter, dtype=torch.float32).to(parameter.dtype))

    return shake
