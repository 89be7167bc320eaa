"""Tiny models, a tokenizer over letters, and what it takes to run vLLM for real."""

from __future__ import annotations

import gc
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.policy import load_policy
from grpo_fast.policy.recurrent import keep_step_limits

TOKENS = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# vLLM's attention on a CPU wants heads of at least 32.
SERVED = TOKENS | {
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
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0},
    "minimax": {
        **{"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
        **{"sliding_window": None, "block_size": 8},
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "gemma3": {"model_type": "gemma3_text"},
}
ROUNDED = ["hrm_text", "qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"]
ROUNDED += ["zamba2", "zaya", "minimax"]


def made(family: str) -> PreTrainedModel:
    """A random model, peaked enough that sampling has a shape to get wrong, but where rounding would grow."""
    from tests.tiny import require_family, tiny_config  # scripts that import this file do not need it

    changes = {"initializer_range": 0.1 if family in ROUNDED else 0.3} | CHANGES.get(family, {})
    kind = changes.pop("model_type", family)
    require_family(kind)
    config = tiny_config(kind)
    config.update(TOKENS | changes)
    # transformers' SDPA leaves Gemma 2's softcap out
    eager = {"attn_implementation": "eager"} if family not in ("llama", "qwen3", "mistral", "gemma3") else {}
    model = AutoModelForCausalLM.from_config(config, **eager).eval()
    keep_step_limits(model)  # as `load_policy` does
    return model


@pytest.fixture
def seed(seed: int) -> int:
    """Of torch's global generator too, from which models take their weights."""
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def family_model(seed: int) -> Callable[[str], PreTrainedModel]:
    return made


@pytest.fixture
def model(seed: int) -> PreTrainedModel:
    return made("llama")


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
    "granitemoehybrid": _MAMBA | _SERVED_MIXED | {"num_local_experts": 0, "shared_intermediate_size": 64},
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
def running_vllm(on_vllms_cpu: None) -> Callable[..., AbstractContextManager]:
    """Return a function that starts vLLM, a context of the engine and its policy."""

    @contextmanager
    def running(folder: Path, *, dtype: str, lora=None, head: bool = True, bits=None, **settings) -> Iterator:
        from grpo_fast.rollout.vllm.engine import VLLMEngine

        own = {"lora": lora, "train_lm_head": head, "quantization": bits}
        model = ModelConfig(path=str(folder), dtype=dtype, device="cpu", **own)
        policy, config = load_policy(model), VLLMConfig(kv_cache_gib=0.05, **settings)
        with VLLMEngine(policy, config, max_length=256) as engine:
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
    """Return a function that changes weights in a random direction, as an optimizer step does."""

    @torch.no_grad()
    def shake(policy, scale: float = 0.05) -> None:
        for parameter in policy.trainable().values():
            parameter.add_(scale * torch.randn_like(parameter, dtype=torch.float32).to(parameter.dtype))

    return shake
