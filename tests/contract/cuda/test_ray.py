"""Uses of Ray in mcore_rl. Machines with GPUs use the same package, so the installed one is checked."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mcore_rl.runtime.cluster import process_environment
from tests.contract.cuda.packages import OURS, SITE_PACKAGES
from tests.contract.cuda.sources import Sources
from tests.contract.cuda.uses import uses

RAY = Sources(SITE_PACKAGES)
USERS = sorted(file for file in OURS.rglob("*.py") if re.search(r"^\s*(?:import|from) ray\b", file.read_text(), re.M))
COMPILED = {"ray._raylet.AuthenticationTokenLoader", "ray._raylet.Config"}
REMOTE_METHOD = re.compile(r"ray\.actor\.ActorHandle\.[a-z]\w*(\.remote)?")
"""Remote methods of our own process classes. Names of ActorHandle itself, which start with "_", are checked."""


@pytest.mark.parametrize("file", USERS, ids=lambda file: str(file.relative_to(OURS)))
def test_uses_of_ray_match_installed_version(file: Path) -> None:
    problems = RAY.problems(
        use
        for use in uses(file, "ray")
        if not use.name.startswith(tuple(COMPILED)) and not REMOTE_METHOD.fullmatch(use.name)
    )
    assert problems == {}


def test_compiled_names_exist() -> None:
    import ray._raylet as compiled

    for name in COMPILED:
        assert hasattr(compiled, name.rpartition(".")[2])


def test_actor_and_method_options_exist() -> None:
    known = "".join((SITE_PACKAGES / "ray" / name).read_text() for name in ("_common/ray_option_utils.py", "actor.py"))
    given = {"num_cpus", "num_gpus", "scheduling_strategy"}
    for file in USERS:
        for node in ast.walk(ast.parse(file.read_text())):
            # remote_method passes its keywords to ray.method.
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("ray.remote", "ray.method", "remote_method"):
                given |= {each.arg for each in node.keywords if each.arg}
    assert {"concurrency_groups", "max_restarts", "num_returns", "concurrency_group"} <= given
    assert [name for name in sorted(given) if f'"{name}"' not in known] == []


def test_environment_variables_are_read_by_ray() -> None:
    text = "".join(file.read_text() for file in sorted((OURS / "runtime").rglob("*.py")))
    ours = set(re.findall(r"\"(RAY_[A-Z_]+)\"", text)) | {
        name for name in process_environment(on_gpus=True) if name.startswith("RAY_")
    }
    assert {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_AUTH_MODE"} <= ours
    files = [file for folder in ("_private", "_common") for file in (SITE_PACKAGES / "ray" / folder).rglob("*.py")]
    python = "".join(file.read_text(encoding="utf-8") for file in files)
    compiled = (SITE_PACKAGES / "ray" / "_raylet.so").read_bytes()
    # Options of the C++ code are read as RAY_ plus their name.
    unread = [n for n in sorted(ours) if not re.search(rf"\b{n}\b", python)]
    assert [n for n in unread if n.removeprefix("RAY_").encode() not in compiled] == []


def test_visible_devices_variable_equals_ray() -> None:
    """Ray and this project must set the same environment variable."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    name = NvidiaGPUAcceleratorManager.get_visible_accelerator_ids_env_var()
    assert f'os.environ["{name}"]' in (OURS / "runtime" / "roles" / "base.py").read_text()
