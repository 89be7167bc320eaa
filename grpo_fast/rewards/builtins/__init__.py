"""The built-in rewards; `grpo_fast.config.rewards` names them."""
