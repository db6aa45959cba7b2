"""What rollout.tools names, read and checked but not loaded: a YAML file in verl's form, or a user's code."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.functions import describe, names_function
from mcore_rl.config.reading.expansion import expanded
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.kinds.sandboxed import SCHEMAS
from mcore_rl.rollout.tools.kinds.verl_tools import LIFECYCLES
from mcore_rl.rollout.tools.limits import Limits

KEY = "rollout.tools"
LIMITS = ("timeout_seconds", "max_running", "retries", "rate_per_second")
OF_FUNCTION = ("function", "processes", "tool_schema", *LIMITS)
OF_BUILTIN = ("builtin", *LIMITS)
OF_CLASS = ("class_name", "config", "tool_schema", "lifecycle", *LIMITS)
OF_MCP = ("class_name", "config", "mcp", *LIMITS)
FORMS = (
    "function: file.py:name, or class_name: pkg.module.Class, or mcp: {mcp_servers_config_path: FILE}, or builtin: "
    "python or shell"
)


@dataclass(frozen=True)
class Entry:
    """One of `tools`, of one kind: `builtin`, `function`, `class_name` or `servers` (a file of MCP servers) is set.
    `told` names file and entry; `processes`: of a function, None: threads."""

    told: str
    limits: Limits
    function: str | None = None
    class_name: str | None = None
    servers: Path | None = None
    schema: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    lifecycle: str = LIFECYCLES[0]
    processes: int | None = None
    selected: tuple[str, ...] | None = None
    builtin: str | None = None


def read_entries(spec: str, timeout_seconds: float) -> list[Entry]:
    """The entries of a YAML file; `timeout_seconds`, of a tool that says nothing else.

    Raises: ConfigError naming file and key.
    """
    told, path = f"{KEY}={spec}", Path(spec)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{told} cannot be read: {describe(error)}; set it to a YAML file of tools, or to module_or_file.py:name"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{told} is not YAML: {' '.join(str(error).split())}") from error
    tools = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(tools, list) or not tools:
        raise ConfigError(f"{told} must hold `tools:`, a list of at least one tool")
    _refuse_unknown(told, content, ("tools",))
    return [_entry(f"{told}: tools[{i}]", each, path.parent, timeout_seconds) for i, each in enumerate(tools)]


def is_code(spec: str) -> bool:
    """Whether rollout.tools names code and no file of tools."""
    return names_function(spec) and not spec.endswith((".yaml", ".yml"))


def _entry(told: str, given: Any, folder: Path, timeout_seconds: float) -> Entry:
    if not isinstance(given, dict):
        raise ConfigError(f"{told} must be a mapping with {FORMS}")
    config = given.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"{told}.config must be a mapping")
    if "builtin" in given:
        _refuse_unknown(told, given, OF_BUILTIN)
        if given["builtin"] not in SCHEMAS:
            raise ConfigError(f"{told}.builtin={given['builtin']} must be one of {', '.join(SCHEMAS)}")
        return Entry(told, _limits(told, given, timeout_seconds), builtin=given["builtin"])
    if "function" in given:
        _refuse_unknown(told, given, OF_FUNCTION)
        function = _code(f"{told}.function", given["function"], folder)
        limits = _limits(told, given, timeout_seconds)
        processes = _number(told, given, "processes", 1, whole=True)
        return Entry(told, limits, function, schema=given.get("tool_schema"), processes=processes)
    if "mcp" in given or config.get("type") == "mcp":
        return _mcp_entry(told, given, config, folder, timeout_seconds)
    if "class_name" not in given:
        raise ConfigError(f"{told} must have {FORMS}")
    _refuse_unknown(told, given, OF_CLASS)
    if config.get("type", "native") != "native":
        raise ConfigError(f"{told}.config.type={config['type']} must be native or mcp")
    lifecycle = given.get("lifecycle", LIFECYCLES[0])
    if lifecycle not in LIFECYCLES:
        raise ConfigError(f"{told}.lifecycle={lifecycle} must be one of {', '.join(LIFECYCLES)}")
    return Entry(
        told,
        _limits(told, given, timeout_seconds),
        class_name=_class(f"{told}.class_name", given["class_name"], folder),
        schema=given.get("tool_schema"),
        config=config,
        lifecycle=lifecycle,
    )


def _mcp_entry(told: str, given: dict[str, Any], config: dict[str, Any], folder: Path, timeout_seconds: float) -> Entry:
    """verl's class_name is of no use here: servers are asked without a class between."""
    _refuse_unknown(told, given, OF_MCP)
    mcp = given.get("mcp")
    if not isinstance(mcp, dict) or not isinstance(mcp.get("mcp_servers_config_path"), str):
        raise ConfigError(f"{told}.mcp.mcp_servers_config_path must name a JSON file of servers")
    _refuse_unknown(f"{told}.mcp", mcp, ("mcp_servers_config_path", "tool_selected_list"))
    selected = mcp.get("tool_selected_list")
    if selected is not None and not (isinstance(selected, list) and all(isinstance(name, str) for name in selected)):
        raise ConfigError(f"{told}.mcp.tool_selected_list must be a list of names of tools")
    verls = {"timeout_seconds": config.get("timeout"), "rate_per_second": config.get("rate_limit")}
    limits = {**{key: value for key, value in verls.items() if value is not None}, **given}
    return Entry(
        told,
        _limits(told, limits, timeout_seconds),
        servers=_beside(f"{told}.mcp.mcp_servers_config_path", folder, mcp["mcp_servers_config_path"]),
        selected=None if selected is None else tuple(selected),
    )


def _limits(told: str, given: Mapping[str, Any], timeout_seconds: float) -> Limits:
    retries = _number(told, given, "retries", 0, whole=True)
    return Limits(
        timeout_seconds=_number(told, given, "timeout_seconds") or timeout_seconds,
        max_running=_number(told, given, "max_running", 1, whole=True),
        retries=Limits(1).retries if retries is None else retries,
        rate_per_second=_number(told, given, "rate_per_second"),
    )


def _number(told: str, given: Mapping[str, Any], key: str, minimum: int = 0, *, whole: bool = False) -> Any:
    """A number of at least `minimum`, which one that need not be `whole` must exceed."""
    value = given.get(key)
    if value is None:
        return None
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not right or value < minimum or (value == minimum and not whole):
        form = f"a whole number of at least {minimum}" if whole else f"a number above {minimum}"
        raise ConfigError(f"{told}.{key}={value} must be {form}")
    return value


def _refuse_unknown(told: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{told} has no key {key}; the keys are: {', '.join(known)}")


def _code(told: str, spec: Any, folder: Path) -> str:
    if not isinstance(spec, str) or not names_function(spec):
        raise ConfigError(f"{told}={spec} must be module_or_file.py:name")
    source, _, name = spec.rpartition(":")
    return f"{_beside(told, folder, source)}:{name}" if source.endswith(".py") else spec


def _class(told: str, spec: Any, folder: Path) -> str:
    """verl's `pkg.module.Class` as `pkg.module:Class`."""
    if isinstance(spec, str) and not names_function(spec) and "." in spec:
        module, _, name = spec.rpartition(".")
        spec = f"{module}:{name}"
    return _code(told, spec, folder)


def _beside(told: str, folder: Path, path: str) -> Path:
    """The absolute path of a file that a file of tools names: beside that file where it exists, else relative to the
    working directory; `~` and environment variables are replaced.

    Raises: ConfigError.
    """
    path = expanded(told, path)
    near = folder / path
    return Path(os.path.abspath(near if near.exists() else path))
