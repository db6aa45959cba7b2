"""Imports of an engine's process, done once by the fork server of a test process."""

from __future__ import annotations

import importlib

from mcore_rl.engines.vllm.arguments import set_environment
from mcore_rl.engines.vllm.optional_imports import import_without_lowering
from mcore_rl.processes.large_imports import first_import

set_environment(300)  # vLLM reads it on import
with first_import("vllm"):
    import_without_lowering()
    for _name in ("vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "mcore_rl.engines.vllm.engine"):
        importlib.import_module(_name)
