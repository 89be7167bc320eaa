"""Our kernels under other people's trainers: thin adapters, each tested against the real library."""
