"""Configurations of well-known models, for planning and benchmarks without a download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_QWEN2 = {"vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_QWEN3 = _QWEN2 | {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
_LLAMA3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, *, tied: bool, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **others,
    }


# name: (transformers' model type, what its published config.json says)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M": (
        "llama",
        _sizes(576, 1536, 30, 9, tied=True, num_key_value_heads=3, vocab_size=49152, rope_theta=1e5),
    ),
    "Qwen2.5-0.5B": ("qwen2", _QWEN2 | _sizes(896, 4864, 24, 14, tied=True, num_key_value_heads=2)),
    "Qwen2.5-1.5B": ("qwen2", _QWEN2 | _sizes(1536, 8960, 28, 12, tied=True, num_key_value_heads=2)),
    "Qwen2.5-3B": ("qwen2", _QWEN2 | _sizes(2048, 11008, 36, 16, tied=True, num_key_value_heads=2)),
    "Qwen2.5-7B": (
        "qwen2",
        _QWEN2 | _sizes(3584, 18944, 28, 28, tied=False, num_key_value_heads=4, vocab_size=152064),
    ),
    "Qwen3-0.6B": ("qwen3", _QWEN3 | _sizes(1024, 3072, 28, 16, tied=True)),
    "Qwen3-1.7B": ("qwen3", _QWEN3 | _sizes(2048, 6144, 28, 16, tied=True)),
    "Qwen3-8B": ("qwen3", _QWEN3 | _sizes(4096, 12288, 36, 32, tied=False)),
    "Llama-3.2-1B": ("llama", _LLAMA3 | _sizes(2048, 8192, 16, 32, tied=True, head_dim=64)),
    "Llama-3.1-8B": ("llama", _LLAMA3 | _sizes(4096, 14336, 32, 32, tied=False)),
}


def architecture(name: str) -> PretrainedConfig:
    """The configuration of a model in `SHAPES`, by name in any case.

    Raises:
        ValueError: it is not one of them; the message lists them.
    """
    from transformers import AutoConfig

    known = {shape.lower(): shape for shape in SHAPES}
    if name.lower() not in known:
        raise ValueError(f"model {name!r} is not a shape known here; known are {', '.join(SHAPES)}")
    model_type, sizes = SHAPES[known[name.lower()]]
    return AutoConfig.for_model(model_type, **sizes)


def model_config(source: str, *, revision: str | None = None) -> PretrainedConfig:
    """A model's configuration, without its weights and without running code of its own.

    Args:
        source: a folder or a `config.json` file, a name in `SHAPES`, a hub id, or `package:NAME`.
        revision: of the hub's repository.

    Raises:
        ValueError: none of these leads to a configuration.
    """
    from transformers import AutoConfig

    from grpo_fast.policy.gguf import PREFIX
    from grpo_fast.policy.load import resolve_source

    if source.startswith(PREFIX):
        source = resolve_source(source)
    if source.lower() in {shape.lower() for shape in SHAPES} and not Path(source).exists():
        return architecture(source)
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model {source!r} has no configuration that can be read ({reason}); give a folder or a "
            f"config.json, a hub id that can be reached, or one of {', '.join(SHAPES)}"
        ) from error
