"""Construction of the tools of rollout.tools, in the process in which they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_rl.config.functions import describe, load_module, load_object
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.entries import KEY, ToolEntry, is_code, read_entries
from mcore_rl.rollout.tools.interface import Tool
from mcore_rl.rollout.tools.kinds.functions import THREADS, FunctionTool, PooledFunctionTool, is_async
from mcore_rl.rollout.tools.kinds.mcp_servers import read_servers
from mcore_rl.rollout.tools.kinds.sandboxed import SandboxedTool
from mcore_rl.rollout.tools.kinds.verl_names import MARK_ATTRIBUTE, FunctionMark
from mcore_rl.rollout.tools.kinds.verl_tools import VerlTool, is_verl_tool
from mcore_rl.rollout.tools.limits import LimitedTool, ToolLimits
from mcore_rl.rollout.tools.schemas import Schema, checked_schema, name_of, schema_of_function
from mcore_rl.sandbox.check import check_local

FORM = "a function with type hints, a class of verl's form or with `schema` and `call`, or a list of them"


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
    if spec.endswith(".py") or is_code(spec):
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
    functions = {id(each): each for each in vars(load_module(KEY, spec)).values() if hasattr(each, MARK_ATTRIBUTE)}
    if not functions:
        raise ConfigError(f"{KEY}={spec} has no function with @function_tool; add it, or name one: {KEY}={spec}:NAME")
    return list(functions.values())


async def _made(
    entry: ToolEntry, given: object, derived: Mapping[str, Schema], sandbox: SandboxConfig
) -> Sequence[tuple[Tool, ToolLimits]]:
    if entry.builtin is not None:
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
