"""Kinds of tools: plain functions, verl's classes, those of MCP servers."""
