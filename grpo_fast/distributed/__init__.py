"""The ranks of a run: torchrun's processes, each with a device of its own, or one process alone."""
