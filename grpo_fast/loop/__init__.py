"""The loop of all algorithms: completions are collected, an update is made of them."""
