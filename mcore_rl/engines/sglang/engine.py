"""SGLang as a ports.Engine. Its schedulers run in processes of SGLang's environment and are stepped from here."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from mcore_rl.engines.rank_engine import RankEngine
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.sglang.processes import RankProcesses, start_rank
from mcore_rl.engines.sglang.settings import NewRequest, RankSettings
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.engines.stepped_engine import ActiveRequest
from mcore_rl.errors import ConfigError
from mcore_rl.processes.child import kill_all
from mcore_rl.types import GenerationRequest
from mcore_rl.weights.engine_config import engine_overrides

SPARE_TOKENS = 6
"""Tokens added to SGLang's context length. It truncates responses two tokens before the end of the context, and rejects
prompts (including a partial response) that reach into its last six tokens (tp_worker.py, scheduler.py)."""


class SglangEngine(RankEngine):
    """SGLang engine.

    Raises: ConfigError for settings that SGLang does not support, and if SGLang is not installed.
    """

    _ranks: RankProcesses

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        if torch.cuda.is_available():  # not checked earlier: cluster.device=auto is resolved with torch
            raise ConfigError("rollout.engine=sglang supports CPU only; set cluster.device=cpu or rollout.engine=vllm")
        cache_bytes = int(settings.rollout_config.kv_cache_gib * 2**30)
        ranks = RankSettings(_server_arguments(settings), settings.rollout_config.tp, cache_bytes)
        self._ranks = RankProcesses(ranks, settings.name, settings.timeout_seconds, settings.hosts)
        self.vocab_size = self._ranks.vocab_size

    def shutdown(self) -> None:
        self._ranks.end()

    def _empty_prefix_cache(self, recompute: bool) -> bool:
        while not self.num_running and not self._ranks.call("is_idle")[0]:
            self._ranks.call("step")  # finished and aborted requests leave in the next step
        return all(self._ranks.call("reset_prefix_cache", recompute))

    def _add(self, added: Mapping[str, ActiveRequest]) -> None:
        self._ranks.call("add", [self._new(engine_id, entry) for engine_id, entry in added.items()])

    def _new(self, engine_id: str, entry: ActiveRequest) -> NewRequest:
        parameters = sampling_arguments(entry.request, len(entry.token_ids), self._settings.eos_token_ids)
        token_ids = entry.request.token_ids.tolist() + entry.token_ids
        return NewRequest(engine_id, token_ids, parameters, salt=f"version {self.weight_version}")

    def _run_step(self) -> list[StepOutput]:
        # SGLang steps an aborted request once more.
        return [output for output in self._ranks.call("step")[0] if output.engine_id in self._running]

    def _cancel(self, engine_ids: Sequence[str]) -> None:
        self._ranks.call("abort", list(engine_ids))

    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        routing: dict[str, np.ndarray] = self._ranks.call("routing_of", list(engine_ids))[0]
        return routing


def sampling_arguments(request: GenerationRequest, num_sampled: int, eos_token_ids: Sequence[int]) -> dict[str, object]:
    """Return the arguments of SGLang's SamplingParams for the rest of a response with `num_sampled` tokens."""
    sampling, stops = request.sampling, list(eos_token_ids)
    return {
        "max_new_tokens": sampling.max_response_tokens - num_sampled,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": stops,
        "ignore_eos": not stops,
        "sampling_seed": request.seed,
    }


def _server_arguments(settings: EngineSettings) -> dict[str, object]:
    config = settings.rollout_config
    arguments: dict[str, object] = {
        "model_path": str(settings.model_dir),
        "json_model_override_args": json.dumps(
            engine_overrides(settings.model_dir, load_weights=settings.load_weights, key=settings.names.checkpoint)
        ),
        "device": "cpu",
        "dtype": settings.dtype,
        "load_format": "auto" if settings.load_weights else "dummy",
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": True,  # with overlap a step returns the previous batch
        "context_length": config.max_prompt_tokens + config.max_response_tokens + SPARE_TOKENS,
        "max_running_requests": config.max_concurrent_requests,
        "tp_size": config.tp,
        "ep_size": config.tp if config.expert_parallel else 1,
        "random_seed": settings.seed,
        "log_level": "error",
        "enable_return_routed_experts": settings.capture_routing,
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,  # only an upper bound of max_total_tokens
    }
    if config.max_batched_tokens is not None:
        arguments["chunked_prefill_size"] = config.max_batched_tokens
    return arguments


def follow(settings: EngineSettings) -> None:
    """See engines.vllm.engine.follow. The ranks receive settings and commands from the first host."""
    hosts, num_ranks = settings.hosts, settings.rollout_config.tp
    address = f"{hosts.address}:{hosts.commands_port}"
    ranks = [start_rank(rank, num_ranks, address, hosts.key) for rank in hosts.ranks(num_ranks)]
    try:
        # Ranks have no connection to this process: only their exit codes show that they ended.
        while all(rank.exit_code is None for rank in ranks):
            time.sleep(0.2)
    finally:
        kill_all(ranks)
