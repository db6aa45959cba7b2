"""Fields of config.json that vLLM and SGLang read, found in the syntax trees of their sources without imports."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.contract.engines import SGLANG

CONFIGS = {"config", "hf_config", "hf_text_config", "text_config", "pretrained_config"}
"""Names of variables and attributes for config.json in the code of models."""
ENGINE_WIDE = CONFIGS - {"config", "text_config"}
"""The same in code for all models, where `config` is ambiguous."""
READERS = {"getattr", "hasattr", "getattr_iter", "_hf_attr"}
FOREIGN = {
    "vllm": (
        *("model_executor/models", "entrypoints", "multimodal", "renderers", "tokenizers", "lora", "benchmarks"),
        *("transformers_utils/configs", "transformers_utils/processors", "v1/spec_decode", "v1/worker/gpu/spec_decode"),
        *("config/speculative.py", "v1/worker/gpu", "distributed/kv_transfer", "model_executor/layers/quantization"),
        *("reasoning", "tool_parsers", "parser", "plugins", "third_party", "v1/metrics", "v1/attention/backends/mla"),
        *("models", "model_executor/warmup", "model_executor/model_loader/tensorizer.py"),
        *("config/engram.py", "v1/hisparse", "model_executor/kernels", "model_executor/layers/pooler"),
        *("model_executor/layers/mamba", "model_executor/layers/attention/sparse_mla_attention.py"),
    ),
    "sglang": (
        *("models", "multimodal", "entrypoints", "configs", "speculative", "disaggregation", "lora", "arg_groups"),
        *("layers/quantization", "layers/attention", "hardware_backend", "function_call", "parser", "eplb"),
        *(
            "model_loader/expert_pack_loader.py",
            "model_loader/expert_pack_config.py",
            "debug_utils",
            "compilation",
            "dllm",
        ),
        *("mem_cache", "layers/moe/paged_experts", "model_executor/pool_configurator.py", "managers"),
        *("model_executor/model_runner_components/spec_aux_hidden_state.py",),
    ),
}
"""Folders of unused features: other models, modalities, pooling, speculation, quantized weights."""
WHOLE = {
    "vllm": ("transformers_utils/config.py", "transformers_utils/model_arch_config_convertor.py"),
    "sglang": ("configs/model_config.py", "utils/hf_transformers/config.py", "layers/logits_processor.py"),
}
"""Files with code for all models in which `config` is config.json."""
SHARED = {"interfaces", "interfaces_base", "utils", "adapters", "module_mapping", "vision", "transformers"}
"""Helper modules that models import. They read no fields of their own."""
LOADERS = {("sglang", "glm4_moe"): {"deepseek_v2", "deepseek_nextn"}}
"""(engine, module) -> imported modules from which only weight loading is used."""


def root(engine: str) -> Path | None:
    """Return the folder of the engine's sources; None if it is not installed."""
    if engine == "vllm":
        spec = importlib.util.find_spec("vllm")
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    return next(SGLANG.parents[1].glob("lib/python3*/site-packages/sglang/srt"), None)


def model_module(engine: str, architecture: str) -> str:
    """Return the name of the file that defines the architecture's class."""
    folder = models_folder(engine)
    found = [path.stem for path in sorted(folder.glob("*.py")) if architecture in _classes(path)]
    assert len(found) == 1, f"{architecture} in {found}"
    return found[0]


def models_folder(engine: str) -> Path:
    folder = root(engine)
    assert folder is not None
    return folder / ("model_executor/models" if engine == "vllm" else "models")


def fields_of_model(engine: str, architecture: str) -> dict[str, list[str]]:
    """Return the fields that the model's file and its imported models read, with the places."""
    folder, found = models_folder(engine), defaultdict[str, list[str]](list)
    pending, seen = [model_module(engine, architecture)], set[str]()
    while pending:
        module = pending.pop()
        if module in seen or module in SHARED or not (folder / f"{module}.py").is_file():
            continue
        seen.add(module)
        pending += set(_imported_models(folder / f"{module}.py")) - LOADERS.get((engine, module), set())
        _add(found, folder / f"{module}.py", CONFIGS)
    return dict(found)


def fields_of_all_models(engine: str) -> dict[str, list[str]]:
    """Return the fields that code for all models reads, with the places."""
    folder, found = root(engine), defaultdict[str, list[str]](list)
    assert folder is not None
    whole = {folder / name for name in WHOLE[engine]}
    foreign = [folder / name for name in FOREIGN[engine]]
    for path in sorted({*folder.rglob("*.py"), *whole}):
        if path in whole:
            _add(found, path, CONFIGS)
        elif not any(path.is_relative_to(other) for other in foreign):
            _add(found, path, ENGINE_WIDE)
    return dict(found)


def _add(found: dict[str, list[str]], path: Path, names: set[str]) -> None:
    for field, line in reads(path, frozenset(names)):
        found[field].append(f"{path.name}:{line}")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _classes(path: Path) -> set[str]:
    if "class " not in path.read_text(encoding="utf-8"):
        return set()
    return {node.name for node in _tree(path).body if isinstance(node, ast.ClassDef)}


def _imported_models(path: Path) -> list[str]:
    prefix = "sglang.srt.models."
    modules = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.level == 1:
                modules.append(node.module)
            elif node.module.startswith(prefix):
                modules.append(node.module.removeprefix(prefix))
    return modules


def reads(path: Path, names: frozenset[str]) -> Iterator[tuple[str, int]]:
    if not any(name in path.read_text(encoding="utf-8") for name in names):
        return
    for function in ast.walk(_tree(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                yield from ((field, node.lineno) for field in _fields(node, function, names) if field[0] != "_")


def _fields(node: ast.AST, function: ast.AST, names: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value, names):
        yield node.attr
    elif isinstance(node, ast.Subscript) and _is_config(node.value, names):
        yield from _texts(node.slice)
    elif isinstance(node, ast.Call):
        called, args = node.func, node.args
        if isinstance(called, ast.Name) and called.id in READERS and len(args) > 1 and _is_config(args[0], names):
            yield from _computed(args[1].id, function) if isinstance(args[1], ast.Name) else _texts(args[1])
        elif isinstance(called, ast.Attribute) and called.attr == "get" and args and _is_config(called.value, names):
            yield from _texts(args[0])


def _is_config(node: ast.AST, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "get_text_config"
    return (isinstance(node, ast.Name) and node.id in names) or (isinstance(node, ast.Attribute) and node.attr in names)


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _computed(name: str, function: ast.AST) -> Iterator[str]:
    """Yield the strings of the list that the variable `name` is, or iterates over."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets, value = (node.targets if isinstance(node, ast.Assign) else [node.target]), node.value
        elif isinstance(node, ast.For | ast.comprehension):
            targets, value = [node.target], node.iter
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            if isinstance(value, ast.List | ast.Tuple):
                yield from (text for element in value.elts for text in _texts(element))
            elif isinstance(value, ast.Name) and value.id != name:
                yield from _computed(value.id, function)
