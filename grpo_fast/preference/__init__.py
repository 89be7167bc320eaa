"""Training on fixed completions: preference pairs and ranked groups."""
