"""`python -m benchmarks.variants`: how many kernels a training run compiles, without compiling any.

Triton compiles a kernel again when an argument's type, alignment or compile-time constant changes. Batches
differ in their number of tokens, in temperature and in what is masked; none of that may cost a user a
compilation in the middle of a run. The launchers run on meta tensors; Triton's own cache keys are counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

from .aot import compile_only
from .aot_cases import Batch, _dense_backward, _forward, _sparse_backward

TOKENS = (1, 2, 15, 16, 500, 1024, 4096, 16_383, 16_384, 65_536, 100_000)
STEPS = (_forward, _sparse_backward, _dense_backward)


def variants(capability: int, launches: Sequence[Callable[[], None]]) -> dict[str, int]:
    """Compiled variants of each kernel that the launches need."""
    from triton.runtime.jit import JITFunction

    def remember(self, key, signature, device, *_):
        stub = SimpleNamespace(hash=key)
        self.device_caches[device][0][key] = stub
        return stub

    found: set[tuple[str, str]] = set()
    with mock.patch.object(JITFunction, "_do_compile", remember), compile_only(capability) as compiled:
        for launch in launches:
            launch()
        found = {(function.fn.__name__, stub.hash) for function, stub, _ in compiled}
    names = sorted(name for name, _ in found)
    return {name: names.count(name) for name in names}


def over_tokens(capability: int, tokens: Sequence[int], **batch: object) -> dict[str, int]:
    """Of a whole step, forward and both backwards, over batches of these sizes."""
    batches = [replace(Batch(**batch), rows=rows) for rows in tokens]
    return variants(capability, [partial(step, b, capability) for b in batches for step in STEPS])


def main() -> int:
    """Variants of each kernel: of one batch, and over batches of many sizes."""
    for capability in (80, 90):
        one, many = (over_tokens(capability, tokens) for tokens in (TOKENS[-2:-1], TOKENS))
        print(json.dumps({"capability": capability, "one batch": one, "many batches": many}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
