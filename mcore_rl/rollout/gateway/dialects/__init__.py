"""Dialects of the gateway's server: the HTTP interfaces of OpenAI and Anthropic, in JSON and as server-sent events."""
