"""Allowed imports between packages, checked on the syntax trees: nothing is imported."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANYONE = {"errors", "parent_death", "durable_files"}
MAY_IMPORT = {
    "errors": set(),
    "parent_death": set(),
    "durable_files": set(),
    "config": set(),
    "types": set(),
    "resolved": {"types", "config", "data", "model_converters"},
    "ports": {"types", "config"},
    "algorithms": {"types", "config"},
    "vision": {"types", "config"},
    "processes": {"types"},
    "data": {"types", "config", "processes", "vision"},
    "sandbox": {"types", "config", "processes"},
    "rewards": {"types", "config", "data", "ports", "sandbox", "processes"},
    "weights": {"types", "config", "model_converters", "processes", "remote"},
    "megatron": {"types", "config", "resolved", "algorithms", "data", "model_converters", "weights", "vision"},
    "engines": {"types", "config", "ports", "weights", "processes", "vision"},
    "rollout": {"types", "config", "data", "ports", "sandbox", "processes", "vision"},
    "remote": {"config"},
    "planner": {"config", "resolved", "algorithms", "model_converters", "megatron", "weights"},
    "preparation": {
        *("types", "config", "resolved", "data", "algorithms", "rewards", "rollout", "sandbox", "trainer", "megatron"),
        *("model_converters", "remote", "vision", "engines"),
    },
    "runtime": {
        *("types", "config", "resolved", "ports", "data", "megatron", "engines", "rollout", "weights", "rewards"),
        *("processes", "vision"),
    },
    "trainer": {"types", "config", "algorithms", "data", "ports", "remote"},
    "observe": {"types", "config", "remote"},
    "slurm": {"config", "runtime", "doctor"},
    "model_converters": set(),
    "doctor": {"resolved", "config", "sandbox", "observe"},
    "migration": {"config", "observe"},
    "debugging": {
        *("config", "resolved", "ports", "data", "preparation", "planner", "runtime", "trainer", "observe"),
        *("assembly", "role_groups", "verbs", "remote"),
    },
    "starter": {"config", "remote", "data", "doctor", "planner"},
}
"""Folder or top-level module -> folders that it may import, in addition to itself and ANYONE. Modules of the command
line, which connect the parts, are absent: they may import anything, and no listed module may import them. `debugging`
has commands, too, so it may import `assembly`, `role_groups` and `verbs`."""

MAX_FILES = 20
"""Maximum number of files in one folder of the product, without its __init__.py."""

ONE_DOOR = {
    "megatron": ["mcore_rl/megatron/*"],
    "ray": ["mcore_rl/runtime/*"],
    "vllm": ["mcore_rl/engines/vllm/*"],
    "sglang": ["mcore_rl/engines/sglang/*"],
    "xgrammar": ["mcore_rl/engines/grammars/*"],
    "mcp": ["mcore_rl/rollout/tools/kinds/mcp_servers.py"],
    "openai": ["mcore_rl/rewards/judge/server.py", "mcore_rl/serving.py", "mcore_rl/rollout/connectors/client.py"],
    "verifiers": ["mcore_rl/rollout/connectors/verifiers.py"],
    "gymnasium": ["mcore_rl/rollout/connectors/gymnasium.py"],
    "openenv": ["mcore_rl/rollout/connectors/openenv.py"],
    "inspect_ai": ["mcore_rl/rollout/connectors/inspect.py"],
    "lm_eval": ["mcore_rl/rollout/connectors/lm_eval.py"],
    "fastapi": ["mcore_rl/rollout/gateway/*"],
    "starlette": ["mcore_rl/rollout/gateway/*"],
    "uvicorn": ["mcore_rl/rollout/gateway/*"],
    "uvloop": ["mcore_rl/rollout/gateway/*"],
    "tree_sitter": ["mcore_rl/migration/shell/*"],
    "tensorboard": ["mcore_rl/observe/trackers/tensorboard.py"],
    "wandb": ["mcore_rl/observe/trackers/wandb.py"],
    "mlflow": ["mcore_rl/observe/trackers/mlflow.py"],
    "trackio": ["mcore_rl/observe/trackers/trackio.py"],
    "swanlab": ["mcore_rl/observe/trackers/swanlab.py"],
    "argcomplete": ["mcore_rl/completion.py"],
    "huggingface_hub": ["mcore_rl/remote/hub.py", "mcore_rl/observe/trackers/trackio.py"],
    "fsspec": ["mcore_rl/remote/file_systems.py", "mcore_rl/remote/storage.py"],
    "prometheus_client": ["mcore_rl/observe/endpoint.py"],
}
INSIDE_FUNCTIONS = {
    "model_converters/dcp/convert.py": "mcore_rl.megatron",
    "model_converters/dcp/logits.py": "mcore_rl.megatron",
    "model_converters/cli.py": "mcore_rl.megatron",
}


@cache
def sources() -> dict[str, Path]:
    """Return module name -> file of all modules of the product."""
    files = [f for package in ("mcore_rl", "model_converters") for f in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(module: str, *, at_load_only: bool = False) -> Iterator[str]:
    """Return the modules that `module` imports. at_load_only: without functions and TYPE_CHECKING blocks."""
    path = sources()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    pending: list[ast.AST] = [tree(path)]
    while pending:
        node = pending.pop()
        if at_load_only and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            submodules = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in sources()]
            yield from submodules
            if len(submodules) < len(node.names):
                yield base


def room(module: str) -> str | None:
    """Return the key of MAY_IMPORT for a module of the project; None for third-party modules."""
    parts = module.split(".")
    if module == "model_converters.durable_files":  # not in mcore_rl, which model_converters may not import
        return parts[1]
    if parts[0] == "model_converters":
        return parts[0]
    if parts[0] == "mcore_rl":
        return parts[1] if len(parts) > 1 else "mcore_rl"
    return None


def relative(module: str) -> str:
    return sources()[module].relative_to(ROOT).as_posix()


def test_rooms_import_only_what_the_table_allows() -> None:
    broken = [
        f"{relative(module)} imports {target}"
        for module in sources()
        for target in imports(module)
        if room(module) in MAY_IMPORT
        and room(target) not in {None, room(module), *ANYONE, *MAY_IMPORT[room(module) or ""]}
        and not target.startswith(INSIDE_FUNCTIONS.get(relative(module), "nothing"))
    ]
    assert not broken, "\n".join(broken)


def test_converters_reach_megatron_only_inside_functions() -> None:
    present = [m for m in sources() if relative(m) in INSIDE_FUNCTIONS]
    broken = [(m, target) for m in present for target in imports(m, at_load_only=True) if room(target) == "megatron"]
    assert not broken


def test_third_parties_have_one_door() -> None:
    broken = [
        f"{relative(module)} imports {target}"
        for module in sources()
        for target in imports(module)
        for doors in [ONE_DOOR.get(target.split(".")[0], ["*"])]
        if not any(fnmatch.fnmatch(relative(module), door) for door in doors)
    ]
    assert not broken, "\n".join(broken)


def test_megatron_is_imported_behind_its_cpu_backend() -> None:
    """If a module without the call were imported first, later modules would have no simulated device."""
    files = sources().values()
    importing = {f.parent for f in files if re.search(r"^(from|import) megatron\b", f.read_text(), re.MULTILINE)}
    broken = [folder for folder in importing if "\ncpu.install()\n" not in (folder / "__init__.py").read_text()]
    assert importing
    assert broken == []


def test_driver_imports_no_library_that_only_other_processes_need() -> None:
    """Each of them would delay the start of every run by a second or more."""
    pending, reached, libraries = ["mcore_rl.runtime.launch"], set[str](), set[str]()
    while pending:
        module = pending.pop()
        if module in reached:
            continue
        reached.add(module)
        targets = set(imports(module, at_load_only=True))
        pending += targets & sources().keys()
        libraries |= {target.split(".")[0] for target in targets}
    assert "ray" in libraries, "nothing was followed"
    assert not libraries & {"fastapi", "uvicorn", "uvloop", "megatron", "vllm", "sglang", "transformers", "datasets"}


def test_no_import_cycles() -> None:
    graph = {m: {t for t in imports(m, at_load_only=True) if t in sources() and t != m} for m in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def test_every_folder_is_in_the_table() -> None:
    folders = {p.name for p in (ROOT / "mcore_rl").iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert folders <= set(MAY_IMPORT)


def test_rooms_are_small_enough_to_look_around_in() -> None:
    folders = {path.parent for path in sources().values()}
    counts = {str(f.relative_to(ROOT)): sum(p.name != "__init__.py" for p in f.glob("*.py")) for f in folders}
    assert {folder: files for folder, files in counts.items() if files > MAX_FILES} == {}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "mcore_rl.config, mcore_rl.cli, mcore_rl.completion, mcore_rl.doctor, mcore_rl.sandbox.local",
            ["mcore_rl.doctor.checks", "torch", "transformers", "ray", "vllm", "megatron", "numpy"],
        ),
        ("mcore_rl.types", ["torch", "transformers", "ray"]),
        ("model_converters", ["transformers", "ray", "vllm", "megatron", "mcore_rl"]),
        # The driver builds no model, so it must not spend seconds on this import at every start.
        (
            "mcore_rl.assembly, mcore_rl.preparation.prepare",
            ["megatron", "numba", "vllm", "torch.distributed.checkpoint"],
        ),
    ],
)
def test_importing_is_light(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import a.b\nfrom c import d\ndef f():\n    from . import x\n    import late\nclass K:\n    import inside\n"
    )
    (tmp_path / "m.py").write_text(source)
    found = {"mcore_rl.r.m": tmp_path / "m.py", "mcore_rl.r.x": tmp_path / "x.py"}
    monkeypatch.setattr(sys.modules[__name__], "sources", lambda: found)
    assert sorted(imports("mcore_rl.r.m")) == ["a.b", "c", "inside", "late", "mcore_rl.r.x"]
    assert sorted(imports("mcore_rl.r.m", at_load_only=True)) == ["a.b", "c", "inside"]
