"""Real engines in separate processes, so that a test process never imports one."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.tokenizer import plain_decoder
from mcore_rl.types import Completion, GenerationRequest
from tests.selection import needs_package, on_demand_unless

T = TypeVar("T")

SGLANG = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
SGLANG_IS_READY = SGLANG.parents[1].joinpath(".mcore-rl-ready").exists()
WITH_SGLANG = pytest.mark.skipif(not SGLANG_IS_READY, reason="needs .venv-sglang: make sglang")
MARKS = {"vllm": [], "sglang": [WITH_SGLANG]}
ON_DEMAND = on_demand_unless(False)
NEEDS_TORCHVISION = needs_package("torchvision", "make setup")
"""Mark of families whose classes in vLLM import torchvision (Family.vllm_imports)."""
PASS_TOKENS = 32
"""Maximum tokens of one pass: prompts that are submitted together are computed in pieces."""
ATTENTION_DP = {"tp": 2, "expert_parallel": True, "data_parallel_attention": True}
"""Settings of two SGLang ranks with different requests."""
RANKS = [
    *(
        pytest.param((kind, {"tp": tp}), id=f"{kind}-tp{tp}", marks=[*marks, *on_demand_unless(tp == 1)])
        for tp in (1, 2)
        for kind, marks in MARKS.items()
    ),
    *(
        pytest.param((kind, {"tp": tp, **keys}), id=f"{kind}-tp{tp}-{next(iter(keys))}", marks=MARKS[kind] + ON_DEMAND)
        for kind, keys in (("sglang", {"overlap_schedule": True}), ("vllm", {"draft": "ngram"}))
        for tp in (1, 2)
    ),
    *(
        pytest.param(
            ("sglang", {**ATTENTION_DP, **keys}), id="-".join(["sglang-dp2", *keys]), marks=[WITH_SGLANG, *ON_DEMAND]
        )
        for keys in ({}, {"overlap_schedule": True})
    ),
]
"""Engines with one and two ranks, and keys of rollout. test_two_ranks.py tests failures that need several ranks, and
test_drafts.py compares responses with and without drafts."""
DIVIDED_BY_TWO = {"head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
"""Sizes of a model that two SGLang ranks can divide between them on CPU."""
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
"""Sizes for which vLLM's CPU kernel of latent attention is compiled."""
DELTA_NETS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Sizes for which vLLM's CPU kernels of gated delta nets are compiled. They compute in bfloat16 only."""
EVERY_EXPERT = {"num_experts": 4, "num_experts_per_tok": 4}
"""Every token uses every expert. Otherwise bfloat16 changes a choice near a tie, depending on the machine's kernels,
which costs more than rounding."""


def one_character_per_token(token_ids: Sequence[int]) -> str:
    """Decode each token to one character."""
    return "".join(chr(ord("0") + token_id) for token_id in token_ids)


def _start(kind: str, directory: str, settings: dict[str, Any]) -> Any:
    from mcore_rl.engines.registry import engine_class
    from mcore_rl.engines.settings import EngineSettings

    return engine_class(kind)(EngineSettings(directory, **settings))


def _serve(connection: Any, kind: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    engine, method = None, ""
    while method != "shutdown":
        method, args = connection.recv()
        try:
            result: Any = None
            if method in ("start", "shutdown"):
                if engine is not None:
                    engine.shutdown()
                engine = None
                engine = _start(kind, *args) if method == "start" else None
            elif method == "generate":
                result = []
                engine.generate(*args, result.append)
            elif callable(method):
                result = method(engine, *args)
            else:
                result = attrgetter(method)(engine)
                result = result(*args) if callable(result) else result
            connection.send(("ok", result))
        except Exception as error:
            connection.send(("error", (type(error), str(error), traceback.format_exc())))


class RemoteEngine:
    """RankEngine in another process. Errors are raised here with their type."""

    directory: Path
    settings: dict[str, Any]

    def __init__(self, kind: str) -> None:
        self.kind = kind
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind))
        self.process.start()
        theirs.close()

    def start(
        self,
        directory: Path,
        dtype: str = "float32",
        load_weights: bool = True,
        capture_routing: bool = False,
        float32_head: bool = False,
        float32_router: bool = False,
        tokenizer: Any = None,
        **rollout: Any,
    ) -> RemoteEngine:
        """Start an engine with a small KV cache; token 1 is the end of sequence. Another engine in the same process is
        shut down before, and saves the time of the imports."""
        small = {
            "max_prompt_tokens": 32,
            "max_response_tokens": 32,
            "max_concurrent_requests": 32,
            "kv_cache_gib": 0.03,
        }
        settings = {
            "rollout_config": RolloutConfig(engine=self.kind, **(small | rollout)),
            "dtype": dtype,
            "eos_token_ids": [1],
            "seed": 1,
            "name": "the engine",
            "timeout_seconds": 300,  # the first calls on a GPU compile kernels
            "load_weights": load_weights,
            "capture_routing": capture_routing,
            "float32_head": float32_head,
            "float32_router": float32_router,
            "decode": one_character_per_token if tokenizer is None else plain_decoder(tokenizer),
            "tokenizer": tokenizer,
        }
        self.call("start", str(directory), settings)
        self.directory, self.settings = directory, settings
        return self

    def call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        """Call a method by name (for example `connect`), or a function with the engine as first argument."""
        self._connection.send((method, args))
        state, result = self._connection.recv()
        if state == "ok":
            return result
        kind, message, trace = result
        raise kind(message) from RuntimeError(trace)

    @property
    def logp_tolerance(self) -> float:
        """Tolerance between two runs of the same request.

        SGLang on CPU uses torch's matrix products, whose last bits depend on the number of rows.
        """
        return 1e-5 if self.kind == "sglang" else 0.0

    @property
    def weight_version(self) -> int:
        return self.call("weight_version")

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
        return {completion.request_id: completion for completion in self.call("generate", requests)}

    def shutdown(self) -> None:
        """End the engine and its process; does nothing the second time."""
        if self.process.exitcode is not None:
            return
        self.call("shutdown")
        self.process.join(30)
        if self.process.exitcode is None:
            self.process.kill()


def start_engine(kind: str, directory: Path, *arguments: Any, **settings: Any) -> RemoteEngine:
    """Start an engine in a process of its own; arguments of RemoteEngine.start."""
    return RemoteEngine(kind).start(directory, *arguments, **settings)


def families_of_engines(cases: Iterable[T], with_sglang: Collection[T]) -> list[ParameterSet]:
    """Return (kind, case) for each engine and case; for SGLang those that are not in `with_sglang` run on demand."""
    return [
        pytest.param(kind, case, marks=[*marks, *on_demand_unless(kind == "vllm" or case in with_sglang)])
        for kind, marks in MARKS.items()
        for case in cases
    ]
