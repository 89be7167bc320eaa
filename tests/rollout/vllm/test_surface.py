"""Everything of vLLM that the engine touches, looked up in vLLM's source without importing it.

A GPU is not needed for it, and any number of versions can be compared: unpack their wheels and run
`python tests/rollout/vllm/test_surface.py FOLDER…`, each folder one that holds `vllm/`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

# For each class, function or method of a file: the parameters, fields or attributes of `self` that are used.
SURFACE = """
entrypoints/llm.py LLM: llm_engine
engine/arg_utils.py EngineArgs: dtype seed load_format max_model_len max_num_seqs enforce_eager
engine/arg_utils.py EngineArgs: enable_prefix_caching logprobs_mode generation_config disable_log_stats
engine/arg_utils.py EngineArgs: hf_overrides kv_cache_memory_bytes gpu_memory_utilization enable_sleep_mode
engine/arg_utils.py EngineArgs: tensor_parallel_size distributed_executor_backend enable_lora max_loras
engine/arg_utils.py EngineArgs: enable_return_routed_experts
engine/arg_utils.py EngineArgs: max_lora_rank cudagraph_capture_sizes enable_chunked_prefill
config/model.py ModelConfig: max_model_len use_mla head_dtype
outputs.py CompletionOutput: routed_experts
sampling_params.py SamplingParams: max_tokens temperature top_p top_k min_p seed stop
sampling_params.py SamplingParams: include_stop_str_in_output stop_token_ids ignore_eos logprobs
sampling_params.py SamplingParams: prompt_logprobs flat_logprobs detokenize output_kind
sampling_params.py RequestOutputKind: FINAL_ONLY
v1/engine/llm_engine.py LLMEngine: engine_core model_config model_executor output_processor
v1/engine/llm_engine.py LLMEngine.add_request: request_id prompt params lora_request
v1/engine/llm_engine.py LLMEngine.step:
v1/engine/llm_engine.py LLMEngine.abort_request: request_ids
v1/engine/llm_engine.py LLMEngine.has_unfinished_requests:
v1/engine/llm_engine.py LLMEngine.reset_encoder_cache:
v1/engine/llm_engine.py LLMEngine.reset_prefix_cache:
v1/engine/llm_engine.py LLMEngine.sleep: level
v1/engine/llm_engine.py LLMEngine.wake_up: tags
v1/engine/llm_engine.py LLMEngine.is_sleeping:
v1/engine/llm_engine.py LLMEngine.collective_rpc: method kwargs
v1/engine/llm_engine.py LLMEngine.add_lora: lora_request
v1/engine/llm_engine.py LLMEngine.remove_lora: lora_id
v1/engine/llm_engine.py LLMEngine.get_tokenizer:
v1/engine/core.py EngineCore.sleep: level mode
v1/engine/core.py EngineCore.shutdown:
v1/engine/output_processor.py OutputProcessor: request_states
v1/engine/output_processor.py RequestState: detokenizer
v1/engine/detokenizer.py IncrementalDetokenizer.num_output_tokens:
v1/executor/uniproc_executor.py UniProcExecutor: driver_worker
v1/executor/uniproc_executor.py ExecutorWithExternalLauncher:
v1/worker/worker_base.py WorkerWrapperBase: worker
v1/worker/worker_base.py WorkerBase.get_model:
v1/worker/gpu_worker.py Worker: model_runner
v1/worker/gpu_worker.py Worker.get_model:
v1/worker/gpu_worker.py Worker.reload_weights:
v1/worker/gpu_worker.py Worker._maybe_get_memory_pool_context: tag
v1/worker/gpu_model_runner.py GPUModelRunner: kv_caches model
v1/worker/gpu_model_runner.py GPUModelRunner.reload_weights: weights_iterator
v1/worker/gpu/model_runner.py GPUModelRunner: kv_caches model
v1/worker/gpu/model_runner.py GPUModelRunner.reload_weights:
model_executor/layers/utils.py dispatch_cpu_unquantized_gemm: layer remove_weight
model_executor/model_loader/__init__.py register_model_loader: load_format
model_executor/model_loader/base_loader.py BaseModelLoader.download_model: model_config
model_executor/model_loader/base_loader.py BaseModelLoader.load_weights: model model_config
lora/request.py LoRARequest: lora_name lora_int_id lora_path
distributed/parallel_state.py destroy_model_parallel:
distributed/parallel_state.py destroy_distributed_environment:
platforms/interface.py Platform: device_type
device_allocator/__init__.py AllocationData: handle tag
device_allocator/cumem.py CuMemAllocator: instance pointer_to_data
"""
# What is used without a definition to look up: (file, text).
WORDS = (
    ("envs.py", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    ("envs.py", "VLLM_NO_USAGE_STATS"),
    ("envs.py", "VLLM_USE_FLASHINFER_SAMPLER"),
    ("envs.py", "VLLM_HOST_IP"),
    ("config/model.py", '"processed_logprobs"'),
    ("config/parallel.py", '"external_launcher"'),
    ("v1/engine/core.py", '"scheduling"'),
    ("v1/worker/gpu_worker.py", '"weights"'),
    ("v1/worker/gpu_worker.py", '"kv_cache"'),
    ("platforms/cuda.py", '"vllm.v1.worker.gpu_worker.Worker"'),
    ("config/model.py", "max_model_len == -1"),
    ("distributed/parallel_state.py", "torch.distributed.destroy_process_group()"),
)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def definition(module: ast.Module, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Of `Class`, `Class.method` or `function`."""
    scope: ast.AST = module
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        scope = next(
            (n for n in ast.iter_child_nodes(scope) if isinstance(n, kinds) and n.name == part), None
        )
        if scope is None:
            return None
    return scope


def names_in(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Parameters of a function; of a class what it defines, and what is set on `self`."""
    if not isinstance(node, ast.ClassDef):
        arguments = node.args
        return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names = {n.name for n in ast.iter_child_nodes(node) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for inner in ast.walk(node):
        targets = getattr(inner, "targets", [getattr(inner, "target", None)])
        names |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


def surface() -> Iterator[tuple[str, str, list[str]]]:
    for line in SURFACE.strip().splitlines():
        place, _, used = line.partition(":")
        yield (*place.split(), used.split())


def missing(package: Path) -> Iterator[str]:
    """What of the surface a version of vLLM, whose package this is, does not have."""
    for file, name, used in surface():
        node = definition(tree(package / file), name) if (package / file).exists() else None
        if node is None:
            yield f"{file}: {name}"
        else:
            yield from (f"{file}: {name} without {part}" for part in used if part not in names_in(node))
    for file, text in WORDS:
        if text not in (package / file).read_text(encoding="utf-8"):
            yield f"{file}: {text}"


def test_the_installed_vllm_has_everything_that_the_engine_uses():
    spec = find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")

    assert list(missing(Path(spec.submodule_search_locations[0]))) == []


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        problems = list(missing(Path(folder) / "vllm"))
        print(Path(folder).name, "has everything" if not problems else "lacks")
        print(*(f"  {problem}" for problem in problems), sep="\n", end="\n" if problems else "")
