"""The training loop: collect completions, update the policy, evaluate."""
