"""Reading and checking of rollout.tools without loading code: a YAML file in verl's format, or a user's code."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mcore_rl.config.functions import describe, names_function
from mcore_rl.config.reading.expansion import expand_path
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.kinds.sandboxed import SCHEMAS
from mcore_rl.rollout.tools.kinds.verl_tools import LIFECYCLES
from mcore_rl.rollout.tools.limits import ToolLimits

KEY = "rollout.tools"
LIMIT_KEYS = ("timeout_seconds", "max_running", "retries", "rate_per_second")
KEYS = {
    "builtin": ("builtin", *LIMIT_KEYS),
    "function": ("function", "processes", "tool_schema", *LIMIT_KEYS),
    "mcp": ("class_name", "config", "mcp", *LIMIT_KEYS),
    "class_name": ("class_name", "config", "tool_schema", "lifecycle", *LIMIT_KEYS),
}
"""Keys of each form of an entry, which the form's own key selects."""
FORMS = (
    "function: file.py:name, or class_name: pkg.module.Class, or mcp: {mcp_servers_config_path: FILE}, or builtin: "
    "python or shell"
)


@dataclass(frozen=True)
class ToolEntry:
    """Entry of `tools`. Exactly one of `builtin`, `function`, `class_name` and `servers` (a file of MCP servers) is
    set. `origin` names file and entry, for messages. `processes`: number of processes of a function; None: threads."""

    origin: str
    limits: ToolLimits
    function: str | None = None
    class_name: str | None = None
    servers: Path | None = None
    schema: object = None
    config: Mapping[str, object] = field(default_factory=dict)
    lifecycle: str = LIFECYCLES[0]
    processes: int | None = None
    selected: tuple[str, ...] | None = None
    builtin: str | None = None


def read_entries(spec: str, timeout_seconds: float) -> list[ToolEntry]:
    """Read the entries of a YAML file; `timeout_seconds` is the default time limit.

    Raises: ConfigError naming file and key.
    """
    origin, path = f"{KEY}={spec}", Path(spec)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{origin} cannot be read: {describe(error)}; set it to a YAML file of tools, or to module_or_file.py:name"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin} is not YAML: {' '.join(str(error).split())}") from error
    tools = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(tools, list) or not tools:
        raise ConfigError(f"{origin} must hold `tools:`, a list of at least one tool")
    _reject_unknown(origin, content, ("tools",))
    return [_entry(f"{origin}: tools[{i}]", each, path.parent, timeout_seconds) for i, each in enumerate(tools)]


def is_code(spec: str) -> bool:
    """Return True if rollout.tools names code instead of a tool file."""
    return names_function(spec) and not spec.endswith((".yaml", ".yml"))


def _entry(origin: str, given: object, folder: Path, timeout_seconds: float) -> ToolEntry:
    if not isinstance(given, dict):
        raise ConfigError(f"{origin} must be a mapping with {FORMS}")
    config = given.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"{origin}.config must be a mapping")
    forms = (form for form in KEYS if form in given or (form == "mcp" and config.get("type") == "mcp"))
    if (form := next(forms, None)) is None:
        raise ConfigError(f"{origin} must have {FORMS}")
    _reject_unknown(origin, given, KEYS[form])
    if form == "mcp":
        return _mcp_entry(origin, given, config, folder, timeout_seconds)
    limits, schema = _limits(origin, given, timeout_seconds), given.get("tool_schema")
    if form == "builtin":
        if given["builtin"] not in SCHEMAS:
            raise ConfigError(f"{origin}.builtin={given['builtin']} must be one of {', '.join(SCHEMAS)}")
        return ToolEntry(origin, limits, builtin=given["builtin"])
    if form == "function":
        function = _code(f"{origin}.function", given["function"], folder)
        return ToolEntry(origin, limits, function, schema=schema, processes=_count(origin, given, "processes", 1))
    if config.get("type", "native") != "native":
        raise ConfigError(f"{origin}.config.type={config['type']} must be native or mcp")
    lifecycle = given.get("lifecycle", LIFECYCLES[0])
    if lifecycle not in LIFECYCLES:
        raise ConfigError(f"{origin}.lifecycle={lifecycle} must be one of {', '.join(LIFECYCLES)}")
    class_name = _class(f"{origin}.class_name", given["class_name"], folder)
    return ToolEntry(origin, limits, class_name=class_name, schema=schema, config=config, lifecycle=lifecycle)


def _mcp_entry(
    origin: str, given: Mapping[str, object], config: Mapping[str, object], folder: Path, timeout_seconds: float
) -> ToolEntry:
    """Read an entry of MCP servers. verl's class_name is ignored, because servers are called directly."""
    mcp = given.get("mcp")
    if not isinstance(mcp, dict) or not isinstance(mcp.get("mcp_servers_config_path"), str):
        raise ConfigError(f"{origin}.mcp.mcp_servers_config_path must name a JSON file of servers")
    _reject_unknown(f"{origin}.mcp", mcp, ("mcp_servers_config_path", "tool_selected_list"))
    selected = mcp.get("tool_selected_list")
    if selected is not None and not (isinstance(selected, list) and all(isinstance(name, str) for name in selected)):
        raise ConfigError(f"{origin}.mcp.tool_selected_list must be a list of names of tools")
    verls = {"timeout_seconds": config.get("timeout"), "rate_per_second": config.get("rate_limit")}
    limits = {**{key: value for key, value in verls.items() if value is not None}, **given}
    return ToolEntry(
        origin,
        _limits(origin, limits, timeout_seconds),
        servers=_beside(f"{origin}.mcp.mcp_servers_config_path", folder, mcp["mcp_servers_config_path"]),
        selected=None if selected is None else tuple(selected),
    )


def _limits(origin: str, given: Mapping[str, object], timeout_seconds: float) -> ToolLimits:
    retries = _count(origin, given, "retries", 0)
    return ToolLimits(
        timeout_seconds=_amount(origin, given, "timeout_seconds") or timeout_seconds,
        max_running=_count(origin, given, "max_running", 1),
        retries=ToolLimits(1).retries if retries is None else retries,
        rate_per_second=_amount(origin, given, "rate_per_second"),
    )


def _count(origin: str, given: Mapping[str, object], key: str, minimum: int) -> int | None:
    value = given.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= minimum):
        return value
    raise ConfigError(f"{origin}.{key}={value} must be a whole number of at least {minimum}")


def _amount(origin: str, given: Mapping[str, object], key: str) -> float | None:
    value = given.get(key)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        return value
    raise ConfigError(f"{origin}.{key}={value} must be a number above 0")


def _reject_unknown(origin: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{origin} has no key {key}; the keys are: {', '.join(known)}")


def _code(origin: str, spec: object, folder: Path) -> str:
    if not isinstance(spec, str) or not names_function(spec):
        raise ConfigError(f"{origin}={spec} must be module_or_file.py:name")
    source, _, name = spec.rpartition(":")
    return f"{_beside(origin, folder, source)}:{name}" if source.endswith(".py") else spec


def _class(origin: str, spec: object, folder: Path) -> str:
    """Convert verl's `pkg.module.Class` to `pkg.module:Class`."""
    if isinstance(spec, str) and not names_function(spec) and "." in spec:
        module, _, name = spec.rpartition(".")
        spec = f"{module}:{name}"
    return _code(origin, spec, folder)


def _beside(origin: str, folder: Path, path: str) -> Path:
    """Return the absolute path of a file named in a tool file: relative to the tool file if it exists there, else to
    the working directory. `~` and environment variables are expanded.

    Raises: ConfigError.
    """
    path = expand_path(origin, path)
    near = folder / path
    return Path(os.path.abspath(near if near.exists() else path))
