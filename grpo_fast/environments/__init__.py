"""Completions of several turns: tools, environments and what of them the model sees, token by token."""
