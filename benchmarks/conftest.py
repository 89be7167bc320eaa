"""Fixtures and options of the benchmarks, and the table at the end of each run.

A module's `AXES` are its parameters and their defaults, its `SIZES` what `--sizes` changes. A row without a
measurement has the reason.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from grpo_fast.plan.measure import peak_bytes
from grpo_fast.record.logs import provenance

from . import peers as registry
from .measure import FAILED, NO_TIME, Moment, Stopwatch, failure_of, give_back_memory, medians
from .oracle import Oracle, consult
from .problem import DTYPES, FORWARD, LOSSES, MODES, Problem, Setting, multiplication
from .rows import KINDS, make_problems
from .tables import markdown, table

if importlib.util.find_spec("pytest_benchmark") is None:
    raise pytest.UsageError("the benchmarks need pytest-benchmark: pip install 'grpo-fast[bench]'")

ON_GPU, DTYPE = False, "float32"  # as `pytest_configure` sets them for the benchmarks
TRAINABLE, FROZEN = "trainable", "frozen"
MOST_ROUNDS = 25
LISTS = {  # options that take a list with commas: their help, and the values if all modules have the same
    "peer": ("words in the names of the implementations to measure", ()),
    "shape": ("sizes NxHxV of the head", ()),
    "rows": ("kinds of rows", KINDS),
    "loss": ("losses of the head", LOSSES),
    "mode": ("passes", MODES),
    "weight": ("whether the head takes a gradient", (TRAINABLE, FROZEN)),
    "dtype": ("dtypes", tuple(DTYPES)),
    "model": ("architectures, or the model of `bias`", ()),
    "engine": ("rollout engines", ("transformers", "vllm")),
    "tokens": ("numbers of tokens of `bias`", ()),
    "turn": ("turns of `train`", ()),
    "sizes": ("NAME=NUMBER for the sizes that a module lists", ()),
    "seed": ("of all random input (0); several for `recipe`", ()),
}
FORMS = {"shape": r"[1-9]\d*x[1-9]\d*x[1-9]\d*", **dict.fromkeys(("turn", "tokens", "seed"), r"\d+")}
ROWS, DEADLINE = pytest.StashKey[list[dict[str, Any]]](), pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("grpo-fast", "benchmarks of grpo_fast (lists have commas)")
    for name, (what, allowed) in LISTS.items():
        help = what + (f": {', '.join(allowed)}" if allowed else "")
        group.addoption(f"--{name}", type=lambda text: text.split(","), default=[], help=help)
    group.addoption("--device", choices=("cpu", "cuda"), help="CUDA where there is one, unless given")
    group.addoption("--minutes", type=float, default=float("inf"), help="start no measurement after so many")
    group.addoption("--recipe", help="what `recipe` trains (quickstart)")
    group.addoption("--set", action="append", default=[], metavar="KEY=VALUE", help="`recipe`: an override")


def pytest_configure(config: pytest.Config) -> None:
    global ON_GPU, DTYPE
    config.stash[ROWS] = []
    config.stash[DEADLINE] = time.monotonic() + 60 * config.getoption("minutes")
    for name, form in FORMS.items():
        for value in config.getoption(name):
            if not re.fullmatch(form, value):
                wanted = "NxHxV, sizes of the head" if name == "shape" else "a whole number"
                raise pytest.UsageError(f"--{name} {value}: must be {wanted}")
    if not config.getoption("minutes") >= 0:
        raise pytest.UsageError(f"--minutes {config.getoption('minutes')}: must be at least 0")
    if config.getoption("device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device; leave it out to run on the CPU")
    ON_GPU = _device(config).type == "cuda"
    DTYPE = "bfloat16" if ON_GPU else "float32"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by the module's `AXES`, for the session so that peers share inputs."""
    config, module = metafunc.config, metafunc.module
    for name, usual in getattr(module, "AXES", {}).items():
        if name not in metafunc.fixturenames:
            continue
        values, given = list(usual), config.getoption(name, [])
        allowed = LISTS.get(name, ("", ()))[1] or getattr(module, "ALLOWED", {}).get(name, given)
        if name == "peer":
            values = chosen(config, values)
        elif given:
            if wrong := [value for value in given if value not in allowed]:
                wanted = ", ".join(allowed)
                raise pytest.Collector.CollectError(f"--{name} {wrong[0]}: must be one of {wanted}")
            values = given
        metafunc.parametrize(name, values, scope="function" if name == "peer" else "session")
    _changes(config, getattr(module, "SIZES", {}))


def chosen(config: pytest.Config, names: Iterable[str]) -> list[str]:
    """Return the names that contain a word of `--peer`; without `--peer`, all."""
    names, words = list(names), config.getoption("peer") or [""]
    if idle := [word for word in words if not any(word.lower() in name.lower() for name in names)]:
        known = ", ".join(map(repr, names))
        raise pytest.Collector.CollectError(f"--peer {idle[0]}: in no name of {known}")
    return [name for name in names if any(word.lower() in name.lower() for word in words)]


def _changes(config: pytest.Config, sizes: dict[str, Any]) -> dict[str, float]:
    found = {}
    for text in config.getoption("sizes") if sizes else ():
        name, _, value = text.partition("=")
        whole = all(isinstance(usual, int) for usual in sizes.get(name, ()))
        number = value if re.fullmatch(r"\d+" if whole else r"\d+\.?\d*|\.\d+", value) else 0
        if name not in sizes or not float(number):
            wanted = f"NAME=NUMBER above 0, of {', '.join(sizes)}"
            raise pytest.Collector.CollectError(f"--sizes {text}: must be {wanted}")
        found[name] = int(number) if whole else float(number)
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse options that no chosen benchmark has, and remove time limits."""
    names = {name for item in items for name in item.fixturenames}
    names |= {"recipe", "set"} if "test_recipe" in {item.originalname for item in items} else set()
    for name in (*LISTS, "recipe", "set"):
        if items and config.getoption(name) and name not in names:
            raise pytest.UsageError(f"--{name}: the chosen benchmarks have no such option")
    for item in items:
        if config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(0))
        if _device(config).type == "cuda":
            item.add_marker(pytest.mark.benchmark(timer=Moment))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Any:
    if time.monotonic() >= item.config.stash[DEADLINE]:
        pytest.skip(NO_TIME)
    return (yield from _without_traceback(item))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    return (yield from _without_traceback(pyfuncitem))


def _without_traceback(item: pytest.Item) -> Iterator[None]:
    """Turn an error into a skip or a failure without its traceback, which would hold memory."""
    try:
        return (yield)
    except Exception as error:
        status, reason = failure_of(error)
        if status == FAILED and item.config.getoption("verbose") > 0:
            raise
    try:
        give_back_memory(_device(item.config))
    except RuntimeError as error:
        item.session.shouldstop = f"the device takes no more work: {error}"
    if status == FAILED:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo) -> Any:
    report = yield
    if "benchmark" not in item.fixturenames or (report.passed and report.when != "call"):
        return report
    benchmark = item.funcargs.get("benchmark")
    info = benchmark.extra_info if benchmark else {}
    if "sizes" in item.funcargs:
        info["sizes"] = item.funcargs["sizes"] | info.get("sizes", {})
    row = {"fullname": item.nodeid, "params": item.callspec.params, "extra_info": info}
    if report.passed and benchmark.stats:
        row["stats"] = benchmark.stats.as_dict()["stats"]
    elif not report.passed:
        error = call.excinfo.value
        reason = getattr(error, "msg", None) or f"{type(error).__name__}: {error}"
        info["remark"] = f"failed: {reason}" if report.failed else reason
    item.config.stash[ROWS].append(row)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    found = provenance()
    device = torch.cuda.get_device_name() if ON_GPU else found["device"]
    machine_info.pop("node", None)  # the name of the machine
    machine_info |= {"device": device, "versions": found["versions"] | registry.versions()}


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    output_json["command"] = sys.argv[2 if sys.argv[1:2] == ["bench"] else 1 :]
    output_json["not_measured"] = [row for row in config.stash[ROWS] if "stats" not in row]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    title, lines = table(config.stash[ROWS])
    for line in [title, *markdown(lines, aligned=True)] if lines else ():
        terminalreporter.write_line(line)


def _device(config: pytest.Config) -> torch.device:
    return torch.device(config.getoption("device") or ("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return _device(pytestconfig)


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    return int(*pytestconfig.getoption("seed") or ["0"])


@pytest.fixture(scope="module")
def sizes(request: pytest.FixtureRequest, device: torch.device) -> dict[str, Any]:
    """Return the module's `SIZES` on this device with the changes of `--sizes`, without those that are 0."""
    found = {name: on[device.type == "cpu"] for name, on in request.module.SIZES.items()}
    found |= _changes(request.config, request.module.SIZES)
    return {name: size for name, size in found.items() if size}


@pytest.fixture(scope="session")
def problems(shape, rows, loss, mode, weight, dtype, device, seed) -> list[Problem]:
    """Batches of one setting, too many for the cache."""
    if "torch._inductor.compile_fx" in sys.modules:
        torch.compiler.reset()  # after eight shapes Dynamo stops compiling a function
    trainable = weight == TRAINABLE or mode == FORWARD
    setting = Setting(rows, *map(int, shape.split("x")), mode, trainable, dtype, loss)
    return make_problems(setting, device, seed)


@pytest.fixture(scope="session")
def problem(problems: Sequence[Problem]) -> Problem:
    return problems[0]


@pytest.fixture(scope="session")
def oracle(problem: Problem) -> Oracle:
    return consult(problem)


@pytest.fixture(scope="session")
def vendor(problems: Sequence[Problem]) -> Callable[[], None]:
    """Compute one product X Wᵀ by the vendor's library, of each batch in turn."""
    return multiplication([(problem.hidden.detach(), problem.weight.detach()) for problem in problems])


@pytest.fixture
def peak_memory(benchmark: Any, device: torch.device) -> Callable[[Callable[[], object]], None]:
    """Record the peak of torch's allocated bytes during a call, results included."""

    def note(call: Callable[[], object]) -> None:
        give_back_memory(device)
        benchmark.extra_info["peak_bytes"] = peak_bytes(lambda: None, lambda _: call(), device)

    return note


@pytest.fixture
def in_turns(benchmark: Any, device: torch.device, pytestconfig: pytest.Config) -> Callable[..., None]:
    """Time each call after one of a reference, so that other load changes their ratio little.

    `--benchmark-max-time` and `--benchmark-min-rounds` bound the rounds. The watch has the phases.
    """
    clock = Moment if device.type == "cuda" else time.perf_counter

    def seconds_of(call: Callable[[], object]) -> float:
        start = clock()
        call()
        return clock() - start

    def measure(
        run: Callable[[], object],
        reference: Callable[[], object] | None = None,
        name: str = "",
        watch: Stopwatch | None = None,
    ) -> None:
        base, phases, found = [], [], benchmark.extra_info

        def phased() -> None:
            watch.start()
            run()
            phases.append(watch.stop()[1])

        for call in filter(None, (run, reference)):
            call()
        least, seconds = (pytestconfig.getoption(f"benchmark_{of}") for of in ("min_rounds", "max_time"))
        rounds = max(least, min(MOST_ROUNDS, int(float(seconds) / max(seconds_of(run), 1e-9))))
        setup = (lambda: base.append(seconds_of(reference))) if reference else None
        benchmark.pedantic(phased if watch else run, setup=setup, rounds=rounds)
        found |= {"phases": medians(phases)} if phases else {}
        if base and benchmark.stats:
            ratios = [mine / its for mine, its in zip(benchmark.stats.stats.data, base, strict=True)]
            found |= {"ratio": statistics.median(ratios), "reference": name, "reference_seconds": base}
            found["quartiles"] = statistics.quantiles(ratios, n=4, method="inclusive")[::2]

    return measure
