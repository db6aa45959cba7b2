"""vLLM engine: the engine itself, its weight receiver, and workarounds for its CPU build."""
