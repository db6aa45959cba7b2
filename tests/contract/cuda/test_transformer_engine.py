"""Uses of TransformerEngine by megatron-core 0.16.1 and this project, checked against the Python files of each version.

The compiled kernels are not available here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mcore_rl.resolved import implementation
from mcore_rl.resolved.implementation import GROUPED_GEMM_VERSION, PERMUTE_FUSION_VERSION
from tests.contract.cuda.packages import MEGATRON, OURS, TRANSFORMER_ENGINES, needs, sources
from tests.contract.cuda.sources import Definition, Sources
from tests.contract.cuda.uses import Call, Use, keys_of, uses
from tests.readme import ROOT

pytestmark = needs(*TRANSFORMER_ENGINES.values())

ADAPTER = MEGATRON / "extensions" / "transformer_engine.py"
ELSEWHERE = {"post_training", "inference", "fsdp", "multimodal", "T5", "bert", "vision", "mamba", "heterogeneous"}
"""Folders of megatron for unused models and features."""
OLDER = {
    "pytorch.attention.apply_rotary_pos_emb": "does not exist",  # before 2.3
    "pytorch.tensor.QuantizedTensor._data": "does not exist",  # 2.0
    "pytorch.fp8.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer": "has no argument fp8_weights",  # before 1.13
    "pytorch.cpp_extensions.cast_to_fp8": "does not exist",  # 1
}
"""Names that only megatron's branches for older versions of TransformerEngine use."""
KERNELS = {"pytorch.cpp_extensions.rmsnorm_fwd": "does not exist"}
"""Defined by the compiled extension, which the module imports with `*`. Used only by megatron's inference."""
NO_SPLIT = {
    "pytorch.attention._SplitAlongDim": "does not exist",
    "pytorch.attention._SplitAlongDim.apply": "does not exist",
}
"""Names whose absence makes megatron split queries, keys and values with torch.split."""
PLAIN_ROUTER = {
    "pytorch.module.base.get_workspace": "does not exist",
    "pytorch.cpp_extensions.general_gemm": "has no argument workspace",
}
"""Problems that make te_general_gemm None, so that megatron's router multiplies with torch."""
REFUSED = {
    "2.9.0": OLDER
    | KERNELS
    | NO_SPLIT
    | {
        "pytorch.cpu_offload_v1": "does not exist",  # then megatron uses cpu_offload
        "pytorch.tensor.utils.post_all_gather_processing": "does not exist",  # for FP8 parameters, which are not used
    },
    "2.10.0": OLDER | KERNELS | NO_SPLIT | PLAIN_ROUTER,
    "2.11.0": OLDER | KERNELS | NO_SPLIT | PLAIN_ROUTER,
}
"""Names and calls in megatron-core 0.16.1 that a version does not support. megatron has a fallback for each."""
RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
SUPPORT = {
    "delayed": "check_fp8_support",
    "tensorwise": "check_fp8_support",
    "blockwise": "check_fp8_block_scaling_support",
    "mxfp8": "check_mxfp8_support",
}


@pytest.fixture(params=TRANSFORMER_ENGINES)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(version: str) -> Sources:
    return sources(TRANSFORMER_ENGINES[version])


def definition(engine: Sources, name: str) -> Definition:
    there = engine.find(f"transformer_engine.{name}")
    assert there is not None, name
    return there


@cache
def megatrons_uses() -> list[Use]:
    files = [file for file in MEGATRON.rglob("*.py") if not ELSEWHERE & set(file.relative_to(MEGATRON).parts)]
    return [use for file in files if "transformer_engine" in _text(file) for use in uses(file, "transformer_engine")]


def test_uses_megatron_files_call_transformer_engine() -> None:
    names = {use.name.removeprefix("transformer_engine.") for use in megatrons_uses()}
    assert {"pytorch.Linear", "pytorch.fp8.FP8GlobalStateManager", "pytorch.optimizers.FusedAdam",
            "common.recipe.Float8BlockScaling", "pytorch.permutation.moe_permute"} <= names  # fmt: skip
    assert any(use.call and use.name == "transformer_engine.pytorch.GroupedLinear.__init__" for use in megatrons_uses())


def test_problems_of_each_version_are_known(engine: Sources, version: str) -> None:
    problems = engine.problems(megatrons_uses())
    refused = {name.removeprefix("transformer_engine."): why.rpartition(" (")[0] for name, why in problems.items()}
    assert refused == REFUSED[version]


@pytest.mark.parametrize(("version", "there"), [("2.9.0", True), ("2.10.0", False), ("2.11.0", False)])
def test_router_gemm_is_transformer_engine_only_up_to_2_9(version: str, there: bool) -> None:
    engine = sources(TRANSFORMER_ENGINES[version])
    assert all(engine.find(f"transformer_engine.{name}") is not None for name in PLAIN_ROUTER) is there
    binding = re.search(r"cpp_extensions import general_gemm\n.*base import get_workspace(.|\n)*?except ImportError:"
                        r"\n    te_general_gemm = None", _text(ADAPTER))  # fmt: skip
    assert binding is not None, "megatron now imports it differently"


def test_fused_adam_accepts_arguments_of_megatron(engine: Sources) -> None:
    function = next(
        node
        for node in ast.parse((MEGATRON / "optimizer" / "__init__.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "_get_megatron_optimizer_based_on_param_groups"
    )
    given = keys_of(function, "kwargs")
    assert {"params", "adam_w_mode", "betas", "store_param_remainders"} <= set(given)
    signature = engine.signature(definition(engine, "pytorch.optimizers.FusedAdam"))
    assert signature is not None
    assert signature.refuses(Call(0, tuple(given), more=False)) is None


def test_fused_adam_steps_per_group_and_moment_names_as_in_torch(engine: Sources) -> None:
    """optim/host_optimizer.py and optim/optimizer_state.py depend on these names."""
    adam = definition(engine, "pytorch.optimizers.FusedAdam")
    assert adam.node is not None
    stores = {ast.unparse(node) for node in ast.walk(adam.node)
              if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}  # fmt: skip
    assert "group['step']" in stores
    assert not {text for text in stores if "'step'" in text} - {"group['step']"}
    constants = {node.value for node in ast.walk(adam.node) if isinstance(node, ast.Constant)}
    assert {"exp_avg", "exp_avg_sq"} <= constants
    used = (OURS / "megatron" / "optim" / "optimizer_state.py").read_text()
    assert '"step" in group' in used


def test_modules_have_extra_state_of_checkpoints(engine: Sources) -> None:
    """Check the methods that make torch write `_extra_state`, which megatron's adapter handles by name."""
    for method in ("get_extra_state", "set_extra_state"):
        for module in ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention"):
            assert definition(engine, f"pytorch.{module}.{method}").module is not None
    assert "_extra_state" in ADAPTER.read_text()


def test_fp8_recipes_are_classes_of_transformer_engine(engine: Sources) -> None:
    assert set(RECIPES) == set(implementation.RECIPES)
    for name in RECIPES.values():
        assert isinstance(definition(engine, f"common.recipe.{name}").node, ast.ClassDef)


def test_fp8_recipes_capability_equals_transformer_engine(engine: Sources) -> None:
    for recipe, ours in implementation.RECIPES.items():
        check = definition(engine, f"pytorch.fp8.{SUPPORT[recipe]}").node
        assert check is not None
        asked = [re.search(r"compute capability (\d+)\.(\d+)", node.value) for node in ast.walk(check)
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
        lowest = min((int(match[1]), int(match[2])) for match in asked if match)
        assert ours.capability == lowest, recipe
        said = ast.unparse(check)
        assert (ours.below == (12, 0)) == (">= (12, 0)" in said), recipe
        assert (ours.cuda == (12, 9)) == ("float(torch.version.cuda) >= 12.9" in said), recipe


def test_fp8_recipes_version_and_class_equal_megatron() -> None:
    asked: dict[str, tuple[str, tuple[int, ...]]] = {}
    for test, name in _choices_of_recipe():
        text = ast.unparse(test)
        recipe = re.search(r"Fp8Recipe\.(\w+)", text)
        minimum = re.search(r"is_te_min_version\('(\d+)\.(\d+)", text)
        if recipe:
            asked[recipe[1]] = (name, tuple(map(int, minimum.groups())) if minimum else (0,))
    for recipe, ours in implementation.RECIPES.items():
        name, minimum = asked[recipe]
        assert name.removeprefix("TE") == RECIPES[recipe]
        assert ours.engine >= minimum
        assert ours.tokens == (32 if recipe == "mxfp8" else 16)


def _choices_of_recipe() -> Iterator[tuple[ast.expr, str]]:
    """Yield (condition, class) of megatron's chain of `if` statements."""
    for node in ast.walk(ast.parse((MEGATRON / "fp8_utils.py").read_text())):
        if isinstance(node, ast.If):
            for each in node.body:
                if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
                    yield node.test, ast.unparse(each.value.func).rpartition(".")[2]


def test_grouped_gemm_and_permutation_versions_equal_megatron() -> None:
    text = ADAPTER.read_text()
    grouped = re.search(r"is_te_min_version\(\"(\d+)\.(\d+)[^\n]*\n\n    class TEGroupedLinear", text)
    assert grouped is not None
    assert tuple(map(int, grouped.groups())) == GROUPED_GEMM_VERSION
    config = (MEGATRON / "transformer" / "transformer_config.py").read_text()
    fused = re.search(r"fused permutation is not available. Please install TE >= (\d+)\.(\d+)", config)
    assert fused is not None
    assert tuple(map(int, fused.groups())) == PERMUTE_FUSION_VERSION


def test_flash_attention_pin_is_newest_supported_version() -> None:
    engine = sources(TRANSFORMER_ENGINES["2.11.0"])
    limits = definition(engine, "pytorch.attention.dot_product_attention.utils.FlashAttentionUtils.max_version").node
    assert isinstance(limits, ast.Assign)
    newest = re.search(r"'([\d.]+)'", ast.unparse(limits.value))
    assert newest is not None
    assert f"flash-attn=={newest[1]}\n" in (ROOT / "docs" / "gpu.md").read_text()


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
