"""vLLM: the engine, what receives its weights, and the quirks of its CPU build."""
