"""Fine-tune a model with transformers' Trainer, without its logits, by one more line."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from grpo_fast.integrations.huggingface import patch_causal_lm

model = LlamaForCausalLM(  # or AutoModelForCausalLM.from_pretrained(...)
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
)
patch_causal_lm(model)

sequences = torch.arange(32)[:, None] + torch.arange(16)
rows = [{"input_ids": sequence, "labels": sequence} for sequence in sequences]
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder, max_steps=10, learning_rate=1e-2, logging_steps=5, report_to=[], save_strategy="no"
    )
    Trainer(model, options, train_dataset=rows).train()
