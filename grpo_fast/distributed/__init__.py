"""The ranks of a run: the processes of torchrun, or a single process."""
