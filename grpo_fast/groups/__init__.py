"""How prompts become groups, and rewards become advantages."""
