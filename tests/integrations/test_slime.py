"""slime's log-probabilities of a Megatron model against ours in their place, on the real Megatron Core."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_stubs import importable, why_missing, with_gradients
from torch import Tensor, multiprocessing

if reason := why_missing("slime"):
    pytest.skip(reason, allow_module_level=True)

VOCABULARY = 52
ARGS = SimpleNamespace(
    **{"rollout_temperature": 0.7, "rollout_top_p": 1.0, "enable_mtp_training": False, "entropy_coef": 0.1},
    **{"log_probs_chunk_size": 5, "allgather_cp": False, "qkv_format": "thd"},
)


def gpt(ranks: int, tied: bool) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    without = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False}
    without |= {"gradient_accumulation_fusion": False, "tensor_model_parallel_size": ranks}
    torch.manual_seed(3)
    config = TransformerConfig(**sizes, **without, use_cpu_initialization=True)
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    return GPTModel(config, spec, VOCABULARY, 32, share_embeddings_and_output_weights=tied)


def scores(rank: int, ranks: int, tied: bool, store: Path, results: Any) -> None:
    """Compare on each rank; keep the widths of the logits and the largest difference."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # where Megatron puts its buffers
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    with importable("slime"):
        from megatron.core import mpu
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from slime.backends.megatron_utils import loss

        from grpo_fast.integrations import slime as adapter

        CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()  # nothing here is random
        mpu.initialize_model_parallel(tensor_model_parallel_size=ranks)
        model = gpt(ranks, tied)
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(VOCABULARY, (1, 12), generator=generator)
        widths = []

        def evaluate() -> list[Tensor]:
            logits = model(tokens, torch.arange(12)[None], torch.ones(1, 1, 12, 12).triu(1).bool())
            widths.append(logits.shape[-1])
            parts = {"unconcat_tokens": list(tokens[0].split([7, 5])), "total_lengths": [7, 5]}
            parts |= {"response_lengths": [4, 3], "with_entropy": True}
            _, found = loss.get_log_probs_and_entropy(logits.float(), args=ARGS, **parts)
            scores = [torch.cat(found["log_probs"]), torch.cat(found["entropy"])]
            return with_gradients(scores, model.parameters())

        expected = evaluate()
        adapter.patch(ARGS)
        found = evaluate()
        adapter.unpatch()
    apart = max((mine - other).abs().max().item() for mine, other in zip(found, expected, strict=True))
    results[rank] = (widths, apart)
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probabilities_entropies_and_gradients_are_the_hosts(ranks, tied, tmp_path):
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(scores, (ranks, tied, tmp_path / "store", results), nprocs=ranks)
        for widths, apart in results.values():
            assert widths == [VOCABULARY // ranks, 16]
            assert apart < 2e-5


@pytest.mark.parametrize(("name", "value"), [("rollout_top_p", 0.9), ("enable_mtp_training", True)])
def test_an_option_that_reads_logits_is_refused_by_its_name(name, value):
    with importable("slime"):
        from grpo_fast.integrations import slime as adapter

        with pytest.raises(ValueError, match=name):
            adapter.patch(SimpleNamespace(**vars(ARGS) | {name: value}))
