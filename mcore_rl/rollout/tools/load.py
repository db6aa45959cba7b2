"""Tools of rollout.tools: reading of a YAML file in verl's format or of a user's code, and construction of the tools in
the process in which they run."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from mcore_rl.rollout.tools.kinds import adapters
from mcore_rl.rollout.tools.kinds.mcp_servers import read_servers
from mcore_rl.rollout.tools.kinds.verl_names import MARK_ATTRIBUTE, FunctionMark
from mcore_rl.rollout.tools.limits import LimitedTool, ToolLimits
from mcore_rl.rollout.tools.schemas import Schema, checked_schema, name_of, schema_of_function
from mcore_rl.sandbox.check import check_local

KEY = "rollout.tools"
LIMITS = {"timeout_seconds": None, "max_running": 1, "retries": 0, "rate_per_second": None}
"""Keys of ToolLimits. The value is the minimum of a whole number; None: any number above 0."""
KEYS = {
    "builtin": ("builtin", *LIMITS),
    "function": ("function", "processes", "tool_schema", *LIMITS),
    "mcp": ("class_name", "config", "mcp", *LIMITS),
    "class_name": ("class_name", "config", "tool_schema", "lifecycle", *LIMITS),
}
"""Keys of each form of an entry, which the form's own key selects."""
FORM = "a function with type hints, a class of verl's form or with `schema` and `call`, or a list of them"
FORMS = (
    "function: file.py:name, or class_name: pkg.module.Class, or mcp: {mcp_servers_config_path: FILE}, or builtin: "
    "python or shell"
)


@dataclass(frozen=True)
class ToolEntry:
    """Entry of `tools`, or an object that rollout.tools names itself (`form` is empty).

    origin: file and entry, for messages.
    form: one of KEYS.
    target: name of a built-in tool, user code as module_or_file.py:name, or file of MCP servers.
    processes: number of processes of a function; None: threads.
    """

    origin: str
    limits: ToolLimits
    form: str = ""
    target: str = ""
    schema: object = None
    config: Mapping[str, object] = field(default_factory=dict)
    lifecycle: str = adapters.LIFECYCLES[0]
    processes: int | None = None
    selected: tuple[str, ...] | None = None
    given: object = None


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
    limits, target = _limits(origin, given, timeout_seconds), given[form]
    if form == "builtin":
        _check_choice(f"{origin}.builtin", target, adapters.SCHEMAS)
        return ToolEntry(origin, limits, form, target)
    if config.get("type", "native") != "native":
        raise ConfigError(f"{origin}.config.type={config['type']} must be native or mcp")
    lifecycle = given.get("lifecycle", adapters.LIFECYCLES[0])
    _check_choice(f"{origin}.lifecycle", lifecycle, adapters.LIFECYCLES)
    if form == "class_name" and isinstance(target, str) and not names_function(target) and "." in target:
        target = ":".join(target.rsplit(".", 1))  # verl writes pkg.module.Class
    target, processes = _code(f"{origin}.{form}", target, folder), _number(origin, given, "processes", 1)
    return ToolEntry(origin, limits, form, target, given.get("tool_schema"), config, lifecycle, processes)


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
    limits = _limits(
        origin, {**{key: value for key, value in verls.items() if value is not None}, **given}, timeout_seconds
    )
    servers = _beside(f"{origin}.mcp.mcp_servers_config_path", folder, mcp["mcp_servers_config_path"])
    return ToolEntry(origin, limits, "mcp", str(servers), selected=None if selected is None else tuple(selected))


def _limits(origin: str, given: Mapping[str, object], timeout_seconds: float) -> ToolLimits:
    found = {key: _number(origin, given, key, minimum) for key, minimum in LIMITS.items()}
    changed = {key: value for key, value in found.items() if value is not None}
    return replace(ToolLimits(timeout_seconds), **changed)


def _number(origin: str, given: Mapping[str, Any], key: str, minimum: int | None) -> Any:
    """Return a number above 0, or with `minimum` a whole number; None if it is not given."""
    value = given.get(key)
    if value is None:
        return None
    if minimum is None:
        wanted, is_valid = "a number above 0", isinstance(value, int | float) and 0 < value < math.inf
    else:
        wanted, is_valid = f"a whole number of at least {minimum}", isinstance(value, int) and value >= minimum
    if isinstance(value, bool) or not is_valid:
        raise ConfigError(f"{origin}.{key}={value} must be {wanted}")
    return value


def _check_choice(key: str, value: object, choices: Iterable[str]) -> None:
    if value not in list(choices):
        raise ConfigError(f"{key}={value} must be one of {', '.join(choices)}")


def _reject_unknown(origin: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{origin} has no key {key}; the keys are: {', '.join(known)}")


def _code(origin: str, spec: object, folder: Path) -> str:
    if not isinstance(spec, str) or not names_function(spec):
        raise ConfigError(f"{origin}={spec} must be module_or_file.py:name")
    source, _, name = spec.rpartition(":")
    return f"{_beside(origin, folder, source)}:{name}" if source.endswith(".py") else spec


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
    """Settings of a tool process. `schemas`: derived by an earlier process, by name; with them, a replacement process
    need not import transformers."""

    rollout: RolloutConfig
    sandbox: SandboxConfig
    schemas: Mapping[str, Schema] = field(default_factory=dict)


async def load_tools(settings: ToolSettings, on_stuck: Callable[[str], None]) -> dict[str, LimitedTool]:
    """Load every tool of rollout.tools, by name.

    Raises: ConfigError naming file and key, for a tool that cannot be loaded, has no schema, or has a duplicate name.
    """
    spec, timeout_seconds = settings.rollout.tools, settings.rollout.max_tool_seconds
    assert spec is not None
    # FILE.py without a name stands for all functions with the decorator in it.
    if spec.endswith(".py") or (names_function(spec) and not spec.endswith((".yaml", ".yml"))):
        entries = [ToolEntry(f"{KEY}={spec}", ToolLimits(timeout_seconds), given=each) for each in _objects(spec)]
    else:
        entries = read_entries(spec, timeout_seconds)
    tools: dict[str, LimitedTool] = {}
    for entry in entries:
        made, limits = await _made(entry, settings)
        for tool in made:
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


async def _made(entry: ToolEntry, settings: ToolSettings) -> tuple[Sequence[Tool], ToolLimits]:
    """Construct the tools of an entry; returns them and their limits."""
    if entry.form == "builtin":
        # Fails at the start of the run instead of at the model's first call.
        check_local(settings.sandbox)
        return [adapters.SandboxedTool(entry.target, settings.sandbox)], entry.limits
    if entry.form == "mcp":
        return await _of_servers(entry), entry.limits
    given = load_object(f"{entry.origin}: {entry.form}", entry.target) if entry.form else entry.given
    if entry.form == "function" and not inspect.isroutine(given):
        raise ConfigError(f"{entry.origin}: function: {entry.target} is a {type(given).__name__}, not a function")
    if entry.form == "class_name" and not inspect.isclass(given):
        raise ConfigError(f"{entry.origin}: class_name: {entry.target} is not a class")
    if inspect.isroutine(given):
        return _of_function(entry, given, settings.schemas)
    return [_of_class(entry, given) if inspect.isclass(given) else _native(entry.origin, given)], entry.limits


async def _of_servers(entry: ToolEntry) -> list[Tool]:
    tools: dict[str, Tool] = {}
    for server in read_servers(f"{entry.origin}.mcp.mcp_servers_config_path={entry.target}", Path(entry.target)):
        for tool in await server.tools():
            name = name_of(tool.schema)
            if name in tools:
                raise ConfigError(f"{entry.origin}: two servers have a tool {name}; remove one of the servers")
            tools[name] = tool
    selected = tools if entry.selected is None else entry.selected
    for name in selected:
        if name not in tools:
            raise ConfigError(
                f"{entry.origin}.mcp.tool_selected_list: no server has a tool {name}; they have: {', '.join(tools)}"
            )
    return [tool for name, tool in tools.items() if name in selected]


def _of_function(
    entry: ToolEntry, function: Callable[..., object], derived: Mapping[str, Schema]
) -> tuple[Sequence[Tool], ToolLimits]:
    schema, limits = _given_schema(entry) or _schema_of(entry.origin, function, derived), entry.limits
    is_async = inspect.iscoroutinefunction(function)
    if entry.processes is not None:
        if is_async:
            raise ConfigError(f"{entry.origin}.processes={entry.processes} is for functions that are not async")
        # More concurrent calls than processes would wait inside the executor, where the time limit already counts.
        limits = replace(limits, max_running=min(entry.processes, limits.max_running or entry.processes))
        return [adapters.PooledFunctionTool(entry.target, schema, entry.processes)], limits
    if is_async:
        return [adapters.FunctionTool(function, schema)], limits
    limits = replace(limits, max_running=limits.max_running or adapters.THREADS)
    executor = ThreadPoolExecutor(limits.max_running, thread_name_prefix="tool")
    return [adapters.FunctionTool(function, schema, executor)], limits


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
    if not adapters.is_verl_tool(kind):
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
    return adapters.VerlTool(
        tool, checked_schema(f"{entry.origin}: the schema of {kind.__name__}", schema), entry.lifecycle
    )


def _native(origin: str, tool: Any) -> Tool:
    methods = ("call", "close_episode", "close")
    if not all(inspect.iscoroutinefunction(getattr(tool, name, None)) for name in methods):
        raise ConfigError(f"{origin}: {type(tool).__name__} is not {FORM}; a class of its own has async {methods}")
    tool.schema = checked_schema(f"{origin}: the schema of {type(tool).__name__}", getattr(tool, "schema", None))
    made: Tool = tool
    return made


def _given_schema(entry: ToolEntry) -> Schema | None:
    return None if entry.schema is None else checked_schema(f"{entry.origin}.tool_schema", entry.schema)
