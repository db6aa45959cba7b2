"""SGLang as a ports.Engine. Its schedulers run in processes of SGLang's environment and are stepped from here."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from mcore_rl.config.roles import ROLLOUT, KeyNames
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.hosts import ONE_HOST, EngineHosts
from mcore_rl.engines.rank_engine import RankEngine, RanksReceiver
from mcore_rl.engines.sglang.processes import RankProcesses, start_rank
from mcore_rl.engines.sglang.settings import NewRequest, RankSettings
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.engines.stepped_engine import ActiveRequest
from mcore_rl.engines.stop_strings import Decode
from mcore_rl.errors import ConfigError
from mcore_rl.processes.child import kill_all
from mcore_rl.weights.engine_config import engine_overrides


class SglangEngine(RankEngine):
    """SGLang engine of rollout.tp ranks. Arguments: see VllmEngine.

    Raises: ConfigError for settings that SGLang does not support, and if SGLang is not installed.
    """

    _ranks: RankProcesses

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
        decode: Decode | None = None,
        names: KeyNames = ROLLOUT,
    ) -> None:
        super().__init__(rollout_config, captures_routing=capture_routing, decode=decode)
        if torch.cuda.is_available():  # not checked earlier: cluster.device=auto is resolved with torch
            raise ConfigError("rollout.engine=sglang supports CPU only; set cluster.device=cpu or rollout.engine=vllm")
        self._eos_token_ids = list(eos_token_ids)
        settings = RankSettings(
            model=str(model_dir),
            overrides=engine_overrides(model_dir, load_weights=load_weights, key=names.checkpoint),
            rank=0,
            num_ranks=rollout_config.tp,
            init_method="",
            dtype=dtype,
            load_weights=load_weights,
            context_tokens=rollout_config.max_prompt_tokens + rollout_config.max_response_tokens,
            max_requests=rollout_config.max_concurrent_requests,
            max_batched_tokens=rollout_config.max_batched_tokens,
            kv_cache_bytes=int(rollout_config.kv_cache_gib * 2**30),
            captures_routing=capture_routing,
            seed=seed,
        )
        self._ranks = RankProcesses(settings, name, timeout_seconds, hosts)
        self.vocab_size = self._ranks.vocab_size
        self.receiver = RanksReceiver(self._ranks, self._reset_prefix_cache)

    def shutdown(self) -> None:
        self._ranks.end()

    def _empty_prefix_cache(self, recompute: bool) -> bool:
        while not self.num_running and not self._ranks.call("is_idle")[0]:
            self._ranks.call("step")  # finished and aborted requests leave in the next step
        return all(self._ranks.call("reset_prefix_cache", recompute))

    def _add(self, added: Mapping[str, ActiveRequest]) -> None:
        requests = [self._new(engine_id, entry) for engine_id, entry in added.items()]
        self._ranks.call("add", requests)

    def _new(self, engine_id: str, entry: ActiveRequest) -> NewRequest:
        sampling = entry.request.sampling
        return NewRequest(
            engine_id=engine_id,
            token_ids=entry.request.token_ids.tolist() + entry.token_ids,
            seed=entry.request.seed,
            max_new_tokens=sampling.max_response_tokens - len(entry.token_ids),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=self._eos_token_ids,
            salt=f"version {self.weight_version}",
        )

    def _run_step(self) -> list[StepOutput]:
        # SGLang steps an aborted request once more.
        return [output for output in self._ranks.call("step")[0] if output.engine_id in self._running]

    def _cancel(self, engine_ids: Sequence[str]) -> None:
        self._ranks.call("abort", list(engine_ids))

    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        routing: dict[str, np.ndarray] = self._ranks.call("routing_of", list(engine_ids))[0]
        return routing


def follow(
    model_dir: str | Path, config: RolloutConfig, hosts: EngineHosts, *, dtype: str, seed: int, timeout_seconds: float
) -> None:
    """See engines.vllm.engine.follow. The ranks receive settings and commands from the first host."""
    address = f"{hosts.address}:{hosts.commands_port}"
    ranks = [start_rank(rank, config.tp, address, hosts.key) for rank in hosts.ranks(config.tp)]
    try:
        # Ranks have no connection to this process: only their exit codes show that they ended.
        while all(rank.exit_code is None for rank in ranks):
            time.sleep(0.2)
    finally:
        kill_all(ranks)
