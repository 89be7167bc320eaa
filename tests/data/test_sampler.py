import json

import pytest

from grpo_fast.data import Prompt, PromptSampler


def prompts(count, text="prompt"):
    return [Prompt(index, f"{text} {index}", (index, len(text)), {}) for index in range(count)]


def draw(sampler, batches):
    return [prompt.index for _ in range(batches) for prompt in sampler.next()]


def test_every_epoch_has_every_prompt_once_in_an_order_of_epoch_and_seed():
    drawn = draw(PromptSampler(prompts(50), batch_size=20, seed=1), 5)
    other = draw(PromptSampler(prompts(50), batch_size=50, seed=2), 1)
    assert sorted(drawn[:50]) == sorted(drawn[50:]) == sorted(other) == list(range(50))
    assert len({tuple(drawn[:50]), tuple(drawn[50:]), tuple(other)}) == 3


@pytest.mark.parametrize("before", [0, 1, 2, 3, 5, 8])
def test_a_resumed_sampler_goes_on_exactly_also_in_the_middle_of_an_epoch(seed, before):
    original = PromptSampler(prompts(10), batch_size=4, seed=seed)
    draw(original, before)
    state = json.loads(json.dumps(original.state_dict()))
    resumed = PromptSampler(prompts(10), batch_size=4, seed=seed)
    resumed.load_state_dict(state)
    assert draw(resumed, 7) == draw(original, 7)


def test_the_state_of_another_seed_or_of_other_prompts_is_refused():
    state = PromptSampler(prompts(10), batch_size=4, seed=1).state_dict()
    with pytest.raises(ValueError, match="has seed 1, this run 2"):
        PromptSampler(prompts(10), batch_size=4, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="belongs to other prompts"):
        PromptSampler(prompts(10, "question"), batch_size=4, seed=1).load_state_dict(state)
