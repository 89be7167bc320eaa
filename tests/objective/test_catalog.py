"""One word configures a loss; contradictory configurations name the field, the value and the remedy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from grpo_fast.objective import GRPOLossConfig
from grpo_fast.objective.catalog import CATALOG, LOSS_TYPES


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_word_is_enough_and_survives_being_written_and_read(loss_type):
    config, adapter = GRPOLossConfig(loss_type), TypeAdapter(GRPOLossConfig)

    assert (config.epsilon_low, config.epsilon_high) == (CATALOG[loss_type].epsilon or (None, None))
    assert adapter.validate_json(adapter.dump_json(config)) == config


def test_the_upper_epsilon_follows_the_lower_and_replace_keeps_the_rest():
    assert GRPOLossConfig("gspo", epsilon_low=0.1).epsilon_high == 0.1
    config = replace(GRPOLossConfig("dr_grpo", epsilon_high=0.3), max_completion_length=7)
    assert (config.epsilon_low, config.epsilon_high, config.max_completion_length) == (0.2, 0.3, 7)


@pytest.mark.parametrize(
    ("values", "field", "remedy"),
    [
        ({"loss_type": "ppo"}, "loss_type = 'ppo'", "choose one of"),
        ({"epsilon_low": -0.1}, "epsilon_low = -0.1", "greater than or equal to 0"),
        ({"epsilon_high": float("nan")}, "epsilon_high = nan", "finite"),
        ({"delta": 1.2}, "delta = 1.2", "raise delta"),
        ({"value_loss_coef": 0.5}, "value_loss_coef = 0.5", "there is no critic"),
        ({"columns": ["a"]}, "columns = ('a',)", "leave it out"),
        ({"loss_type": "m:f", "columns": ["a", "a"]}, "columns = ['a', 'a']", "name each once"),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "epsilon_high = 0.2", "what verl writes as 0.2 is 1.2"),
        ({"loss_type": "cispo", "epsilon_high": 1.0}, "epsilon_high = 1.0", "is 2.0"),
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile = 1.5", "less than or equal to 1"),
        ({"aggregation": "mean"}, "aggregation = 'mean'", "'token_mean'"),
        ({"beta": "0.1"}, "beta = '0.1'", "a finite number"),
        ({"loss_type": "sapo", "sapo_temperature_pos": 0.0}, "sapo_temperature_pos = 0.0", "greater than 0"),
        ({"loss_type": "gpg", "beta": 0.1}, "beta = 0.1", "set beta = 0"),
        ({"loss_type": "cispo", "epsilon_low": 0.2}, "epsilon_low = 0.2", "leave it out"),
        ({"loss_type": "dapo", "vespo_k_pos": 1.0}, "vespo_k_pos = 1.0", "leave it out"),
        ({"loss_type": "my.module:loss", "entropy_coef": 0.1}, "entropy_coef = 0.1", "leave it out"),
        ({"sampler_correction": "token_mask", "sampler_clip_max": None}, "'token_mask'", "set at least one"),
        ({"sampler_clip_min": 3.0}, "sampler_clip_min = 3.0", "lower it"),
        ({"entropy_coef_min": 2.0}, "entropy_coef_min = 2.0", "swap them"),
        ({"loss_type": "clip_cov", "clip_cov_low": 6.0}, "clip_cov_low = 6.0", "lower it"),
        ({"kl_in_reward": True, "use_bias_correction_kl": True}, "use_bias_correction_kl", "to false"),
        ({"loss_type": "vespo", "sampler_correction": "sequence_mask"}, "'sequence_mask'", "'token_mask'"),
        ({"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "importance_sampling_level", "gspo"),
    ],
)
def test_a_contradiction_is_refused_by_name_with_a_remedy(values, field, remedy):
    with pytest.raises(ValueError) as error:
        GRPOLossConfig(**values)
    assert field in str(error.value) and remedy in str(error.value)


def test_the_losses_and_their_configurations_need_no_pydantic():
    code = "import sys; sys.modules['pydantic'] = sys.modules['pydantic_core'] = None\n"
    code += (
        "import grpo_fast.objective.ranking, grpo_fast.objective.pairs, grpo_fast.objective.loss as loss\n"
    )
    code += "loss.GRPOLossConfig('cispo', beta=0.1)\n"
    code += "try: loss.GRPOLossConfig(beta=True)\nexcept ValueError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "beta = True: should be a finite number\n"
