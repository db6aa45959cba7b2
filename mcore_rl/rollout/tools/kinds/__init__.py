"""Kinds of tools: functions, verl's classes, MCP servers, sandboxed interpreters."""
