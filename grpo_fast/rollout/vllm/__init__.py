"""vLLM as the engine, in the trainer's process."""
