"""Tools of rollout.tools: reading of a YAML file in verl's format or of a user's code, and construction of the tools in
the process in which they run."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.functions import describe, load_module, load_object, names_function
from mcore_rl.config.reading.expansion import expand_path
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.interface import Tool
from mcore_rl.rollout.tools.kinds.adapters import (
    LIFECYCLES,
    SCHEMAS,
    THREADS,
    FunctionTool,
    PooledFunctionTool,
    SandboxedTool,
    VerlTool,
    is_async,
    is_verl_tool,
)
from mcore_rl.rollout.tools.kinds.mcp_servers import read_servers
from mcore_rl.rollout.tools.kinds.verl_names import MARK_ATTRIBUTE, FunctionMark
from mcore_rl.rollout.tools.limits import LimitedTool, ToolLimits
from mcore_rl.rollout.tools.schemas import Schema, checked_schema, name_of, schema_of_function
from mcore_rl.sandbox.check import check_local

KEY = "rollout.tools"
LIMIT_KEYS = ("timeout_seconds", "max_running", "retries", "rate_per_second")
KEYS = {
    "builtin": ("builtin", *LIMIT_KEYS),
    "function": ("function", "processes", "tool_schema", *LIMIT_KEYS),
    "mcp": ("class_name", "config", "mcp", *LIMIT_KEYS),
    "class_name": ("class_name", "config", "tool_schema", "lifecycle", *LIMIT_KEYS),
}
"""Keys of each form of an entry, which the form's own key selects."""
FORM = "a function with type hints, a class of verl's form or with `schema` and `call`, or a list of them"
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
    # Under verl's names in `config`; keys of the entry itself take precedence.
    verls = {"timeout_seconds": config.get("timeout"), "rate_per_second": config.get("rate_limit")}
    limits = {**{key: value for key, value in verls.items() if value is not None}, **given}
    servers = _beside(f"{origin}.mcp.mcp_servers_config_path", folder, mcp["mcp_servers_config_path"])
    chosen = None if selected is None else tuple(selected)
    return ToolEntry(origin, _limits(origin, limits, timeout_seconds), servers=servers, selected=chosen)


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


@dataclass(frozen=True)
class ToolSettings:
    """Settings of a tool process. `schemas`: derived by an earlier process; with them, a replacement process need not
    import transformers."""

    rollout: RolloutConfig
    sandbox: SandboxConfig
    schemas: tuple[Schema, ...] = ()


async def load_tools(settings: ToolSettings, on_stuck: Callable[[str], None]) -> dict[str, LimitedTool]:
    """Load every tool of rollout.tools, by name.

    Raises: ConfigError naming file and key, for a tool that cannot be loaded, has no schema, or has a duplicate name.
    """
    spec, timeout_seconds = settings.rollout.tools, settings.rollout.max_tool_seconds
    assert spec is not None
    derived = {name_of(schema): schema for schema in settings.schemas}
    # FILE.py without a name stands for all functions with the decorator in it.
    if spec.endswith(".py") or (names_function(spec) and not spec.endswith((".yaml", ".yml"))):
        entries = [(ToolEntry(f"{KEY}={spec}", ToolLimits(timeout_seconds)), each) for each in _objects(spec)]
    else:
        entries = [(entry, None) for entry in read_entries(spec, timeout_seconds)]
    tools: dict[str, LimitedTool] = {}
    for entry, given in entries:
        for tool, limits in await _made(entry, given, derived, settings.sandbox):
            limited = LimitedTool(tool, limits, on_stuck)
            if limited.name in tools:
                raise ConfigError(f"{entry.origin}: another tool has the name {limited.name}; rename one")
            tools[limited.name] = limited
    if not tools:
        raise ConfigError(f"{KEY}={spec} has no tools")
    return tools


def _objects(spec: str) -> list[object]:
    """Return the user's objects: the named object, the elements of a list, or all functions with verl's decorator in a
    file."""
    if not spec.endswith(".py"):
        given = load_object(KEY, spec)
        return list(given) if isinstance(given, list | tuple) else [given]
    # By id, because a function can have several names in its file.
    functions = {id(each): each for each in vars(load_module(KEY, spec)).values() if hasattr(each, MARK_ATTRIBUTE)}
    if not functions:
        raise ConfigError(f"{KEY}={spec} has no function with @function_tool; add it, or name one: {KEY}={spec}:NAME")
    return list(functions.values())


async def _made(
    entry: ToolEntry, given: object, derived: Mapping[str, Schema], sandbox: SandboxConfig
) -> Sequence[tuple[Tool, ToolLimits]]:
    if entry.builtin is not None:
        # Fails at the start of the run instead of at the model's first call.
        check_local(sandbox)
        return [(SandboxedTool(entry.builtin, sandbox), entry.limits)]
    if entry.servers is not None:
        return [(tool, entry.limits) for tool in await _of_servers(entry)]
    if entry.function is not None:
        given = load_object(f"{entry.origin}: function", entry.function)
        if not inspect.isroutine(given):
            raise ConfigError(f"{entry.origin}: function: {entry.function} is a {type(given).__name__}, not a function")
    elif entry.class_name is not None:
        given = load_object(f"{entry.origin}: class_name", entry.class_name)
        if not inspect.isclass(given):
            raise ConfigError(f"{entry.origin}: class_name: {entry.class_name} is not a class")
    if inspect.isclass(given):
        return [(_of_class(entry, given), entry.limits)]
    if inspect.isroutine(given):
        return [_of_function(entry, given, derived)]
    return [(_native(entry.origin, given), entry.limits)]


async def _of_servers(entry: ToolEntry) -> list[Tool]:
    assert entry.servers is not None
    tools: dict[str, Tool] = {}
    for server in read_servers(f"{entry.origin}.mcp.mcp_servers_config_path={entry.servers}", entry.servers):
        for tool in await server.tools():
            name = tool.schema["function"]["name"]
            if name in tools:
                raise ConfigError(f"{entry.origin}: two servers have a tool {name}; remove one of the servers")
            tools[name] = tool
    for name in entry.selected or ():
        if name not in tools:
            raise ConfigError(
                f"{entry.origin}.mcp.tool_selected_list: no server has a tool {name}; they have: {', '.join(tools)}"
            )
    return [tool for name, tool in tools.items() if entry.selected is None or name in entry.selected]


def _of_function(
    entry: ToolEntry, function: Callable[..., object], derived: Mapping[str, Schema]
) -> tuple[Tool, ToolLimits]:
    schema = _given_schema(entry) or _schema_of(entry.origin, function, derived)
    if entry.processes is not None:
        assert entry.function is not None
        if is_async(function):
            raise ConfigError(f"{entry.origin}.processes={entry.processes} is for functions that are not async")
        # More concurrent calls than processes would wait inside the executor, where the time limit already counts.
        limits = replace(entry.limits, max_running=min(entry.processes, entry.limits.max_running or entry.processes))
        return PooledFunctionTool(entry.function, schema, entry.processes), limits
    limits = entry.limits
    if not is_async(function):
        limits = replace(limits, max_running=limits.max_running or THREADS)
    return FunctionTool(function, schema, limits.max_running or THREADS), limits


def _schema_of(origin: str, function: Callable[..., object], derived: Mapping[str, Schema]) -> Schema:
    """Return the schema given in the decorator, else from `derived`, else derived from the type hints."""
    given: FunctionMark = getattr(function, MARK_ATTRIBUTE, FunctionMark(None, None))
    name = given.name or function.__name__
    if given.schema is not None:
        schema = checked_schema(f"{origin}: the schema of {name}", _plain(given.schema))
    else:
        schema = derived.get(name) or schema_of_function(origin, function)
    return checked_schema(origin, schema | {"function": schema["function"] | {"name": given.name or name_of(schema)}})


def _plain(schema: object) -> object:
    """Convert verl's schema object to a dict."""
    return schema.model_dump(exclude_none=True) if hasattr(schema, "model_dump") else schema


def _of_class(entry: ToolEntry, kind: type) -> Tool:
    if not is_verl_tool(kind):
        try:
            made = kind(**entry.config)
        except Exception as error:  # any error of a user's class
            raise ConfigError(f"{entry.origin}: {kind.__name__}(**config) raised {describe(error)}") from error
        return _native(entry.origin, made)
    from verl.tools.schemas import OpenAIFunctionToolSchema  # verl's class, or the stand-in

    schema: object = _given_schema(entry)
    try:
        tool = kind(dict(entry.config), OpenAIFunctionToolSchema.model_validate(schema) if schema else None)
        if schema is None:
            schema = _plain(getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema())
    except Exception as error:  # any error of a user's class or of verl's schema class
        raise ConfigError(
            f"{entry.origin}: {kind.__name__}(config, tool_schema) raised {describe(error)}; check its tool_schema"
        ) from error
    return VerlTool(tool, checked_schema(f"{entry.origin}: the schema of {kind.__name__}", schema), entry.lifecycle)


def _native(origin: str, tool: Any) -> Tool:
    methods = ("call", "close_episode", "close")
    if not all(inspect.iscoroutinefunction(getattr(tool, name, None)) for name in methods):
        raise ConfigError(f"{origin}: {type(tool).__name__} is not {FORM}; a class of its own has async {methods}")
    tool.schema = checked_schema(f"{origin}: the schema of {type(tool).__name__}", getattr(tool, "schema", None))
    made: Tool = tool
    return made


def _given_schema(entry: ToolEntry) -> Schema | None:
    return None if entry.schema is None else checked_schema(f"{entry.origin}.tool_schema", entry.schema)
