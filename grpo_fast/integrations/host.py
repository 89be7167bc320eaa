"""A host library: its known versions, the losses it can serve, the attributes that a patch replaces."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from importlib import metadata
from typing import Any

from grpo_fast.objective import GRPOLossConfig

_TERMS = {
    "reference": ("a reference model's log-probabilities", "beta"),
    "entropy": ("entropies", "entropy_coef, use_adaptive_entropy and top_entropy_quantile"),
    "sampler": ("log-probabilities of a sampler beside the old policy's", "sampler_correction"),
}
_ABSENT = object()


def require(module: str, *known: str) -> None:
    """Import a host library of a version this package was tested with.

    Args:
        module: what to import; installed under the same name, with hyphens.
        known: version prefixes, such as "0.9".

    Raises:
        ImportError: the library is missing, or of another version.
    """
    distribution = module.replace("_", "-")
    try:
        version = getattr(importlib.import_module(module), "__version__", None)
        version = metadata.version(distribution) if version is None else version
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}); this adapter needs {distribution} {' or '.join(known)}"
        ) from error
    if not any(version == prefix or version.startswith(f"{prefix}.") for prefix in known):
        raise ImportError(
            f"{distribution} is version {version}, but this adapter knows {' and '.join(known)} only; "
            f"install '{distribution}=={known[-1]}.*', or a newer grpo-fast"
        )


def require_loss(config: Any, host: str, *absent: str) -> None:
    """Refuse a loss that a host cannot serve.

    Args:
        absent: what the host does not hand to a loss: "reference", "entropy", "sampler".

    Raises:
        TypeError: no configuration, such as the bare name of a loss.
        ValueError: the loss needs what is absent.
    """
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"the loss must be a GRPOLossConfig, such as GRPOLossConfig('gspo'), got {config!r}")
    for name in absent:
        if getattr(config, f"needs_{name}"):
            what, fields = _TERMS[name]
            raise ValueError(
                f"the loss needs {what}, which {host} does not hand to a loss; leave {fields} at the "
                f"default, and use {host}'s own option where it has one"
            )


class Replacements(ExitStack):
    """Attributes of modules, classes and instances that were replaced, until it is closed."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Closing gives the owner its own object back; what it inherited, it inherits again."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)
