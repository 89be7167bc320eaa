"""Where vLLM's own code leaves something out, on modules that look like its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_fast.rollout.vllm.repairs import repair


def experts(bias: bool, grouped: bool) -> Any:
    router = SimpleNamespace(
        e_score_correction_bias=torch.zeros(4) if bias else None,
        use_grouped_topk=grouped,
        num_expert_group=2,
        topk_group=2,
    )
    module = nn.Module()
    module.router = router
    return module


def test_on_a_cpu_a_routers_bias_is_taken_by_its_code_for_groups():
    without, biased, grouped = experts(False, False), experts(True, False), experts(True, True)

    repair(nn.ModuleList([without, biased, grouped]), "cpu")

    assert not without.router.use_grouped_topk
    assert (
        vars(biased.router).items()
        >= {
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
        }.items()
    )
    assert grouped.router.num_expert_group == 2


def test_on_a_cpu_heads_are_turned_without_the_kernel_for_rows():
    module = nn.Module()
    module.rotary_emb = SimpleNamespace(forward_native="torch", _forward_method="kernel")

    repair(nn.ModuleList([module]), "cuda")
    assert module.rotary_emb._forward_method == "kernel"
    repair(nn.ModuleList([module]), "cpu")
    assert module.rotary_emb._forward_method == "torch"


def test_loaders_that_are_partial_functions_have_the_name_that_a_reload_asks_for():
    norm = nn.LayerNorm(2)
    norm.weight.weight_loader = partial(repair, norm)

    repair(norm, "cuda")

    assert norm.weight.weight_loader.__name__ == "repair"


@pytest.mark.parametrize("biased", [True, False])
def test_the_head_of_phi_moe_has_its_bias(biased: bool):
    model = type("PhiMoEForCausalLM", (nn.Module,), {"compute_logits": lambda self, hidden: "vLLM's own"})()
    model.config, model.lm_head = SimpleNamespace(lm_head_bias=biased), nn.Linear(1, 1)
    model.logits_processor = lambda *given: given

    repair(model, "cuda")

    expected = (model.lm_head, "hidden", model.lm_head.bias) if biased else "vLLM's own"
    assert model.compute_logits("hidden") == expected
