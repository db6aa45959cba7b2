"""vLLM behind the Engine protocol, in this process.

The engine core is stepped from here: completions are handed over as they finish, and since all requests are added
before the first step, what is generated depends on nothing but weights, requests and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mcore_rl.config.names import role_key
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.vllm.arguments import ONE_HOST, EngineHosts, engine_arguments, model_arguments, set_environment
from mcore_rl.engines.vllm.ranks import EngineRanks, unlink_queues
from mcore_rl.engines.vllm.receiver import VllmReceiver
from mcore_rl.errors import ConfigError, DataError, WeightSyncError
from mcore_rl.ports import Engine
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions


@dataclass
class _Running:
    """Tokens of one unfinished request."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    routing: list[np.ndarray] = field(default_factory=list)


class VllmEngine:
    """One vLLM engine of rollout.tp ranks.

    `name` stands in messages; ranks have `timeout_seconds` to answer a call. load_weights False: the weights are random
    until the first update of `receiver`. capture_routing: completions carry the experts of their tokens. `hosts`: where
    the ranks are; those of the first one start with this object, others are followed (follower.follow).
    Raises: ConfigError for settings that vLLM cannot run.
    """

    def __init__(
        self,
        model_dir: str | Path,
        rollout_config: RolloutConfig,
        *,
        dtype: str,
        eos_token_ids: Sequence[int],
        seed: int,
        name: str,
        timeout_seconds: float,
        load_weights: bool = True,
        capture_routing: bool = False,
        hosts: EngineHosts = ONE_HOST,
    ) -> None:
        set_environment(timeout_seconds)
        self._config = rollout_config
        self._eos_token_ids = list(eos_token_ids)
        self._asleep: set[str] = set()
        arguments = model_arguments(model_dir, dtype=dtype, seed=seed, load_weights=load_weights)
        if capture_routing and torch.cuda.is_available():
            arguments["enable_return_routed_experts"] = True
        self._engine = _start(engine_arguments(rollout_config, hosts) | arguments, rollout_config)
        self._core = self._engine.engine_core
        self._ranks = EngineRanks(self._engine, name, timeout_seconds, hosts.names[1:])
        self._ranks.call("unlink_queues")
        unlink_queues()
        self.receiver = VllmReceiver(self._ranks, self._reset_prefix_cache)
        if not torch.cuda.is_available():
            self._ranks.call("prepare_cpu_worker")
            if capture_routing:
                self._ranks.call("start_routing_capture")
        self._routed_layers = self._ranks.call("routed_layers")[0] if capture_routing else None
        self._vocab_size = self._engine.model_config.get_vocab_size()

    @property
    def weight_version(self) -> int:
        return self.receiver.version

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None:
        if self._asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self._asleep))}): wake it up before it generates")
        self.receiver.require_whole()
        running = {request.request_id: _Running(request) for request in requests}
        if len(running) != len(requests):
            raise ValueError("request ids of one call must differ")
        for request in requests:
            self._check(request)
        try:
            self._add(requests)
            while running:
                self._step(running, on_finish)
        finally:
            if running:
                self._core.abort_requests(list(running))

    def sleep(self, *, keep_weights: bool) -> int:
        """On GPUs vLLM's sleep mode, level 1 or 2. On CPU vLLM 0.32 has none: its KV cache is freed here, the weights,
        which its kernels keep packed, stay."""
        if "weights" in self._asleep:
            return 0
        if torch.cuda.is_available():
            free = sum(self._ranks.call("free_device_bytes"))
            with self._ranks.waiting("sleep"):
                self._engine.sleep(level=1 if keep_weights else 2)
            released = sum(self._ranks.call("free_device_bytes")) - free
        else:
            self._reset_prefix_cache()
            # Between a sync and the next generation weights are awake alone: a checkpoint then sends them to sleep.
            released = 0 if "kv_cache" in self._asleep else sum(self._ranks.call("release_kv_cache"))
        self._asleep = {"weights", "kv_cache"}
        return released

    def wake_up(self, part: str) -> None:
        if part not in self._asleep:
            return
        if torch.cuda.is_available():
            with self._ranks.waiting("wake_up"):
                self._engine.wake_up(tags=[part])
        elif part == "kv_cache":
            self._ranks.call("restore_kv_cache")
        self._asleep.remove(part)

    def shutdown(self) -> None:
        """Ends the engine's processes and frees its memory; call it once."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._core.shutdown()
        cleanup_dist_env_and_memory()

    def _reset_prefix_cache(self) -> None:
        if not self._core.reset_prefix_cache():
            raise WeightSyncError("vLLM kept its prefix cache, which belongs to the previous weights")

    def _check(self, request: GenerationRequest) -> None:
        length, limit = len(request.token_ids), self._config.max_prompt_tokens
        if not 0 < length <= limit:
            raise DataError(f"prompt {request.request_id}: {length} tokens, rollout.max_prompt_tokens is {limit}")
        if not 0 <= request.token_ids.min() <= request.token_ids.max() < self._vocab_size:
            raise DataError(f"prompt {request.request_id}: a token id is not below the model's {self._vocab_size}")
        wanted, limit = request.sampling.max_response_tokens, self._config.max_response_tokens
        if not 0 < wanted <= limit:
            raise ConfigError(f"{wanted} response tokens asked for, rollout.max_response_tokens is {limit}")

    def _add(self, requests: Sequence[GenerationRequest]) -> None:
        from vllm.v1.engine import EngineCoreRequest

        parameters: dict[SamplingOptions, Any] = {}
        for request in requests:
            if request.sampling not in parameters:
                parameters[request.sampling] = _sampling_params(request.sampling, self._eos_token_ids)
            sampling_params = copy(parameters[request.sampling])
            if request.sampling.temperature > 0:
                sampling_params.seed = request.seed
            self._core.add_request(
                EngineCoreRequest(
                    request_id=request.request_id,
                    prompt_token_ids=request.token_ids.tolist(),
                    mm_features=None,
                    sampling_params=sampling_params,
                    pooling_params=None,
                    # Equal times: the scheduler keeps the order of adding.
                    arrival_time=0.0,
                    lora_request=None,
                    cache_salt=None,
                    data_parallel_rank=None,
                )
            )

    def _step(self, running: dict[str, _Running], on_finish: Callable[[Completion], None]) -> None:
        reasons: dict[str, str] = {}
        with self._ranks.waiting("execute_model"):
            outputs = self._core.get_output().outputs
        for output in outputs:
            entry = running[output.request_id]
            entry.token_ids.extend(output.new_token_ids)
            if output.new_logprobs is not None:
                entry.logp.extend(output.new_logprobs.logprobs[:, 0].tolist())
            if output.routed_experts is not None:
                entry.routing.append(output.routed_experts)
            if output.finish_reason is not None:
                reasons[output.request_id] = str(output.finish_reason)
        # What was aborted may lack tokens, and may not have been in this step at all.
        routing = self._routing_of({i: running[i] for i, reason in reasons.items() if reason != "abort"})
        for request_id, reason in reasons.items():
            on_finish(self._completion(running.pop(request_id), reason, routing.get(request_id)))

    def _routing_of(self, ended: dict[str, _Running]) -> dict[str, np.ndarray]:
        """Experts of all tokens but the last of requests that have ended in this very step."""
        if self._routed_layers is None or not ended:
            return {}
        if torch.cuda.is_available():  # step by step, with rows for layers without experts
            joined = {i: np.concatenate(entry.routing)[:, self._routed_layers] for i, entry in ended.items()}
            return {i: rows.astype(np.int16) if rows.dtype == np.uint16 else rows for i, rows in joined.items()}
        num_tokens = {i: len(entry.request.token_ids) + len(entry.token_ids) - 1 for i, entry in ended.items()}
        routing: dict[str, np.ndarray] = self._ranks.call("routing_of_requests", num_tokens)[0]
        return routing

    def _completion(self, entry: _Running, reason: str, routing: np.ndarray | None) -> Completion:
        if reason not in ("stop", "length", "abort") or len(entry.logp) != len(entry.token_ids):
            raise RuntimeError(
                f"vLLM ended {entry.request.request_id} with {reason!r}, {len(entry.token_ids)} tokens and "
                f"{len(entry.logp)} log-probabilities"
            )
        token_ids, logp = np.array(entry.token_ids, np.int32), np.array(entry.logp, np.float32)
        computed = len(entry.request.token_ids) + len(token_ids) - 1
        if self._routed_layers is not None and reason != "abort" and (routing is None or len(routing) != computed):
            raise RuntimeError(f"vLLM gave no experts for some of the {computed} tokens of {entry.request.request_id}")
        return Completion(entry.request.request_id, token_ids, logp, reason, self.weight_version, routing)


def _start(arguments: dict[str, Any], config: RolloutConfig) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except ValueError as error:
        # Only its message tells a cache that is too small from other mistakes.
        if "cache" in str(error):
            name = "gpu_memory_fraction" if torch.cuda.is_available() else "kv_cache_gib"
            size = f"{role_key(f'rollout.{name}')} ({getattr(config, name):g})"
            raise ConfigError(f"{size} is too small: {error}") from error
        raise ConfigError(f"vLLM cannot run this model with this {role_key('rollout')} section: {error}") from error


def _sampling_params(options: SamplingOptions, eos_token_ids: list[int]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_response_tokens,
        stop_token_ids=eos_token_ids,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
    )


if TYPE_CHECKING:
    _port: type[Engine] = VllmEngine
