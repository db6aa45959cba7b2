"""Kinds of sandbox: how a command is confined and limited, started, and ended with all that it has started."""
