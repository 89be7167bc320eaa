"""The configuration: its keys, how a file becomes one, and what other tools call them."""
