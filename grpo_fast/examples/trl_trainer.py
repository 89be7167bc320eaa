"""Use our head and our fused loss in TRL's GRPO trainer: another class, the same arguments and metrics."""

from typing import Any

from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from grpo_fast.integrations.trl import FastGRPOTrainer

characters = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789"])}
words = Tokenizer(models.WordLevel(characters, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(characters), num_attention_heads=4, **sizes))


def sevens(completions: list[str], **_: object) -> list[float | None]:
    return [completion.count("7") / 8 for completion in completions]


options: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8}
options |= {"max_steps": 4, "learning_rate": 1e-3, "logging_steps": 1, "bf16": False, "report_to": []}
prompts = Dataset.from_list([{"prompt": str(i)} for i in range(16)])
trainer = FastGRPOTrainer(model, sevens, GRPOConfig("out", **options), prompts, processing_class=tokenizer)
trainer.train()
print("falls back to TRL's own loss:", trainer.fallback_reason)
