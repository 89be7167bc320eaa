"""Push a run's model to the Hugging Face Hub at the end of the run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_fast.config.load import dump_config
from grpo_fast.config.record import HubConfig
from grpo_fast.record.callbacks import Callback
from grpo_fast.record.logs import held_out_outcome

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.policy import Policy

CARD = """---
library_name: transformers
tags: [grpo_fast]
---
`{base}`, trained for {step} steps by grpo_fast. {outcome}

```yaml
{config}```
"""


class PushToHub(Callback):
    """Create the repository at the start; upload the model at the end, unless a signal stopped the run."""

    def __init__(self, config: HubConfig) -> None:
        from huggingface_hub import HfApi

        self.push, self.api = config.push, HfApi(library_name="grpo_fast")
        try:
            self.api.create_repo(config.push, private=config.private, exist_ok=True)
        except Exception as error:  # of the hub's client or of its HTTP library
            remedy = "set HF_TOKEN to a token that may write there, or leave out the section hub"
            raise ValueError(f"hub.push = {config.push!r}: {error}; {remedy}") from error

    def on_train_begin(self, step: int, config: TrainConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy

    def on_train_end(self, step: int, stopped_by: str | None) -> None:
        run = self.config.output_dir
        later = f"`grpo-fast export {run} exported && hf upload {self.push} exported` pushes step {step}"
        if stopped_by in ("SIGINT", "SIGTERM", "SIGHUP"):
            print(f"{stopped_by}: not pushed to {self.push}; {later}")
            return
        outcome = held_out_outcome(Path(run)) or "No held-out score was measured."
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.policy.save_pretrained(folder)
                fields = {"base": self.config.model.path, "step": step, "outcome": outcome}
                card = CARD.format(**fields, config=dump_config(self.config))
                (Path(folder) / "README.md").write_text(card, encoding="utf-8")
                done = self.api.upload_folder(repo_id=self.push, folder_path=folder)
            print(f"pushed: {done.commit_url}")
        except Exception as error:
            print(f"not pushed to {self.push} ({type(error).__name__}: {error}); nothing is lost, {later}")
