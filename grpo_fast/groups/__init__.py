"""Group prompts, and compute advantages from rewards."""
