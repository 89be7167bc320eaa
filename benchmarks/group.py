"""`python -m benchmarks group`: the largest group whose update fits, found by trying.

A group is one prompt with n completions of full length, in one forward and backward; micro-batches smaller
than a group would fit any. Each try is an update with its optimizer step, twice, in a process of its own: n
doubles until memory runs out, then the interval is halved. Beside what was found stands what the memory
planner predicts.

On a CPU `--memory` sets by how much a process may grow, whatever libraries allocate for themselves included;
the prediction does not count that. On CUDA the allocator itself refuses. On a CPU a server process imports
the libraries once and forks for each try, so that a try starts at once; what they take does not count.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from grpo_fast.config.policy import ModelConfig

from . import measure, step
from .contest import Contest, Entrant, Found
from .models import add_models, architecture, chosen_models
from .peers import choose_names
from .session import ByDevice, add_common_arguments, add_sizes, check_common, run_session, sizes_of

PREDICTED = "ours, predicted"
SIZES = {
    "prompt": (128, 16, "tokens of the prompt"),
    "completion": (1024, 32, "tokens of a completion"),
    "largest": (1 << 16, 32, "group to try at most"),
}
_CPU_GIB = 0.75
_TRY_SECONDS = 300.0


@dataclass(frozen=True)
class Probe:
    """One group: `size` completions of `completion` tokens for one prompt, in one forward and backward."""

    implementation: str
    model: ModelConfig
    layers: int
    prompt: int  # tokens
    completion: int
    budget: int  # bytes beyond what the libraries take
    size: int = 0


def run_probe(probe: Probe) -> Found:
    """Two updates in a process of their own: beyond the budget it is out of memory.

    Bytes are of model, optimizer and update together; the time is the second's, since the first compiles.
    """
    try:
        device = torch.device(probe.model.device)
        (seconds, allocated), driver = measure.in_a_process(device, _try, probe, seconds=_TRY_SECONDS)
    except measure.Failure as failure:
        return dict(zip(("status", "reason"), failure.args, strict=True))
    memory = measure.Memory(allocated, driver)
    status = measure.OK if memory.best <= probe.budget else measure.OOM
    return {"status": status, "seconds": [seconds], "time": measure.summarise([seconds]), "memory": memory}


def _try(probe: Probe) -> tuple[float, int | None]:
    """Seconds of the second update, and the most bytes that torch had handed out, where it counts them."""
    device = torch.device(probe.model.device)
    if device.type == "cuda":  # the allocator refuses what is beyond the budget
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, probe.budget / total), device)
    lengths = [(probe.prompt, probe.completion)] * probe.size
    update = step.Update(probe.model, probe.layers, lengths, probe.size, sum(map(sum, lengths)))
    watch = measure.Stopwatch(device)
    prepared = step.entrant(probe.implementation, update).prepare()
    for _ in range(2):
        seconds, _ = watch.time(lambda: prepared.run(watch))
    prepared.close()
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def predict_group(probe: Probe) -> int | None:
    """Completions of one prompt whose update the memory planner sees fit; None where not even two do."""
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.plan import device_budget, model_shape
    from grpo_fast.plan.memory import Setup, step_bytes
    from grpo_fast.plan.search import MOST_GENERATIONS
    from grpo_fast.plan.sizes import StepSizes, largest

    config = TrainConfig.model_validate(
        {
            "model": probe.model,
            "dataset": {"source": "no data: only sizes are asked"},
            "rewards": [{"reward": "none"}],
            "rollout": {"engine": "transformers"},
        }
    )
    shape = model_shape(architecture(probe.model.path, probe.layers), probe.model)
    setup = Setup(config, shape, replace(device_budget(), total=probe.budget))
    one = StepSizes(
        prompts=1,
        generations=2,
        prompt_length=probe.prompt,
        completion_length=probe.completion,
        micro_batch_tokens=1 << 40,
    )

    def fits(size: int) -> bool:
        parts = step_bytes(setup, replace(one, generations=size))
        return sum(parts["update"].values()) <= probe.budget

    return largest(2, MOST_GENERATIONS, fits)


def predicted(probe: Probe) -> Found:
    group = predict_group(probe)
    if group is None:
        return {"status": measure.OOM, "reason": "not even two"}
    return {"metrics": {"largest_group": float(group)}}


def search(probe: Probe, largest: int, deadline: float, share: float = 1.0) -> Found:
    """The largest group that fits: doubled from one until memory runs out, then halfway to what did not fit.

    Args:
        deadline: on the monotonic clock; no try begins after `share` of the time that is left until then.
    """
    deadline = time.monotonic() + share * (deadline - time.monotonic())
    fits, fails = 1, None
    best: Found = {"status": measure.SKIPPED, "reason": measure.NO_TIME}
    while time.monotonic() < deadline:
        size = min(largest, 2 * fits) if fails is None else (fits + fails) // 2
        if size == fits:
            break
        found = run_probe(replace(probe, size=size))
        if found["status"] == measure.OK:
            fits, best = size, found
        elif found["status"] == measure.OOM:
            fails = size
        else:
            return found
    if fits == 1:
        return {"status": measure.OOM, "reason": "not even two fit"} if fails else best
    metrics = {"largest_group": float(fits)} | ({"smallest_that_fails": float(fails)} if fails else {})
    reason = "" if fails == fits + 1 else "at least: the next size was not tried"
    return best | {"metrics": metrics, "reason": reason}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=10, repeats=1)
    add_models(parser, ["Qwen2.5-1.5B", "Qwen2.5-0.5B"], ["SmolLM2-135M"], cpu_layers=1)
    add_sizes(parser, SIZES)
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        default=ByDevice(None, _CPU_GIB),
        help=f"of a process beyond its libraries (all of a GPU; on a CPU {_CPU_GIB})",
    )


def main(options: argparse.Namespace) -> int:
    device, deadline = check_common(options), time.monotonic() + 60 * options.minutes
    names = choose_names(list(step.IMPLEMENTATIONS), options.impl)
    if options.memory is None:
        options.memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    if not options.memory > 0:
        raise ValueError(f"--memory must be above 0 GiB, got {options.memory}")
    tokens = sizes_of(options, SIZES)
    largest = tokens.pop("largest")
    measure.preload(step.__name__, *["trl.trainer.grpo_trainer"] * (step.TRL in names))
    contests = []
    for model, shape in chosen_models(options):
        of = partial(Probe, model=model, layers=shape["layers"], **tokens, budget=int(options.memory * 2**30))
        entrants = [
            Entrant(name, partial(search, of(name), largest, deadline, 1 / (len(names) - before)))
            for before, name in enumerate(names)
        ]
        if step.OURS in names:
            entrants.append(Entrant(PREDICTED, partial(predicted, of(step.OURS))))
        shape |= {**tokens, "memory_gib": options.memory, "dtype": options.dtype}
        contests.append(Contest(shape, entrants, device))
    return run_session(options, contests)
