"""A run's model on the Hugging Face hub: checked at the start, pushed at the end, with a card of what was
measured."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.config.record import CONFIG_FILE, HubConfig
from grpo_fast.record.callbacks import Callback
from grpo_fast.record.logs import held_out_outcome

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.policy import Policy

logger = logging.getLogger(__name__)
REFUSED = (401, 403)


class PushToHub(Callback):
    """Pushes the policy when the run has ended, unless a signal stopped it. A failed push costs nothing.

    Raises:
        ValueError: there is no token, the hub refuses it, or it may not write to the repository. A hub that
            cannot be reached now is only told of.
    """

    def __init__(self, config: HubConfig) -> None:
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.errors import HfHubHTTPError

        self.config = config
        self.api = HfApi(token=get_token(), library_name="grpo_fast")
        asked = f"hub.push = {config.push!r}"
        if constants.HF_HUB_OFFLINE:
            raise ValueError(
                f"{asked}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or leave hub out"
            )
        if self.api.token is None:
            raise ValueError(f"{asked} needs a token that may write: set HF_TOKEN, or run `hf auth login`")
        try:
            user: dict[str, Any] = self.api.whoami()
        except Exception as error:  # no network, whatever the HTTP library calls it
            if isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSED:
                raise ValueError(
                    f"{asked}: the hub refuses the token ({error}); set another HF_TOKEN"
                ) from error
            logger.warning("%s: the hub cannot be asked now (%r); the push is tried at the end", asked, error)
            return
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise ValueError(f"{asked}: the token of {user['name']} may only read; make one that may write")
        owners = [user["name"], *(one["name"] for one in user.get("orgs", ()))]
        if config.push.partition("/")[0] not in owners:
            raise ValueError(
                f"{asked}: the token is that of {user['name']}, who may write to {', '.join(owners)}"
            )

    def on_train_begin(self, step: int, config: TrainConfig, policy: Policy) -> None:
        self.run_dir, self.path, self.policy = Path(config.output_dir), config.model.path, policy

    def on_train_end(self, step: int, stopped_by: str | None) -> None:
        name = self.config.push
        later = f"`grpo-fast export {self.run_dir} exported && hf upload {name} exported` pushes step {step}"
        if stopped_by in ("SIGINT", "SIGTERM"):
            print(f"{stopped_by}: not pushed to {name}; {later}")
            return
        if self.policy.sharded:
            print(f"not pushed to {name}: the weights are dealt over ranks; {later}")
            return
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.policy.save_pretrained(folder)
                (Path(folder) / "README.md").write_text(self.card(step), encoding="utf-8")
                self.api.create_repo(name, private=self.config.private, exist_ok=True)
                found = self.api.upload_folder(
                    repo_id=name, folder_path=folder, commit_message=f"Step {step}"
                )
        except Exception as error:
            print(f"not pushed to {name} ({type(error).__name__}: {error}); nothing is lost, {later}")
        else:
            print(f"pushed: {found.commit_url}")

    def card(self, step: int) -> str:
        """The model card: what was trained, from what, and what was measured in this run."""
        from huggingface_hub import ModelCardData

        on_hub = not Path(self.path).expanduser().exists() and ":" not in self.path
        data = ModelCardData(
            base_model=self.path if on_hub else None,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["grpo_fast"],
        )
        measured = held_out_outcome(self.run_dir) or "no held-out score before and after was measured"
        configuration = (self.run_dir / CONFIG_FILE).read_text(encoding="utf-8")
        return (
            f"---\n{data.to_yaml()}\n---\n# {self.config.push.partition('/')[2]}\n\n"
            f"`{self.path}`, trained for {step} steps by grpo_fast.\n\n{measured}\n\n"
            f"## Configuration\n\n```yaml\n{configuration}```\n"
        )
