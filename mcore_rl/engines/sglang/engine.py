"""SGLang as a ports.Engine. Its schedulers run in processes of SGLang's environment and are stepped from here."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch

from mcore_rl.engines.rank_engine import RankEngine
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.sglang.arguments import sampling_arguments, server_arguments, static_fraction
from mcore_rl.engines.sglang.devices.memory import KV_CACHE, WEIGHTS
from mcore_rl.engines.sglang.processes import RankProcesses, start_rank
from mcore_rl.engines.sglang.request_ranks import RequestRanks
from mcore_rl.engines.sglang.settings import GpuMemory, NewRequest, RankSettings
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.engines.stepped_engine import ActiveRequest
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.processes.child import kill_all
from mcore_rl.weights.engine_config import engine_layout, has_vision_tower


class SglangEngine(RankEngine):
    """SGLang engine.

    Raises: ConfigError for settings that SGLang does not support, and if SGLang is not installed.
    """

    _ranks: RankProcesses

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        config, device = settings.rollout_config, _device()
        self._discards_weights = device == "cuda"
        self._request_ranks = RequestRanks(engine_layout(config))
        ranks = RankSettings(
            server_arguments(settings, device),
            config.tp,
            int(config.kv_cache_gib * 2**30),
            device=device,
            num_hosts=settings.hosts.num,
            keep_sets=config.keep_sampling_mask,
            float32_router=settings.float32_router,
        )
        try:
            self._ranks = RankProcesses(
                ranks, settings.name, settings.timeout_seconds, settings.hosts, memory_arguments=self._memory_arguments
            )
        except ConfigError as error:
            if "mem-fraction-static" in str(error):  # SGLang names its own option
                key = settings.names.key("gpu_memory_fraction")
                raise ConfigError(f"{key} ({config.gpu_memory_fraction:g}) is too small: {error}") from error
            raise
        self.vocab_size = self._ranks.vocab_size

    @cached_property
    def _reads_images(self) -> bool:
        return has_vision_tower(self._settings.model_dir)

    def shutdown(self) -> None:
        self._ranks.end()

    def begin_update(self, first_round: int = 0) -> None:
        self._hold(self._outputs(self._ranks.call("drain")))
        super().begin_update(first_round)

    def _memory_arguments(self, memory: Sequence[GpuMemory]) -> dict[str, object]:
        """Return the server arguments that depend on the memory of the ranks' GPUs, the same for all ranks: SGLang
        measures the smallest free memory of all ranks, too."""
        smallest, config = min(memory, key=attrgetter("free")), self._settings.rollout_config
        key = self._settings.names.key("gpu_memory_fraction")
        fraction = static_fraction(smallest.free, smallest.total, config.gpu_memory_fraction, key)
        return {"mem_fraction_static": fraction}

    def _release(self, *, keep_weights: bool) -> int:
        self._reset_prefix_cache(False)
        parts = [part for part in (KV_CACHE, WEIGHTS) if part not in self._asleep]
        released = sum(self._ranks.call("release", parts, keep_weights))
        if self._discards_weights and not keep_weights:
            self.weights_complete = False
        return released

    def _restore(self, part: str) -> None:
        if part == KV_CACHE:
            self._require_complete()
        self._ranks.call("restore", part)

    def _empty_prefix_cache(self, recompute: bool) -> bool:
        while not self.num_running and not all(self._ranks.call("is_idle")):
            self._ranks.call("steps", 1)  # finished and aborted requests leave in the next step
        return all(self._ranks.call("reset_prefix_cache", recompute))

    def _add(self, added: Mapping[str, ActiveRequest]) -> None:
        requests = self._request_ranks.divide([self._new(engine_id, entry) for engine_id, entry in added.items()])
        self._ranks.call_each("add", [(own,) for own in requests])

    def _new(self, engine_id: str, entry: ActiveRequest) -> NewRequest:
        parameters = sampling_arguments(entry.request, len(entry.token_ids), self._settings.eos_token_ids)
        token_ids = entry.request.token_ids.tolist() + entry.token_ids
        salt, keep, images = f"version {self.weight_version}", entry.request.sampling.keeps_sets, entry.request.images
        if images is not None and not self._reads_images:
            raise DataError(f"prompt {entry.request.request_id} has images, but the model reads text only")
        return NewRequest(engine_id, token_ids, parameters, salt, keep, images)

    def _run_step(self, limit: int) -> list[StepOutput]:
        return self._outputs(self._ranks.call("steps", limit))

    def _outputs(self, by_rank: Sequence[list[StepOutput]]) -> list[StepOutput]:
        """Collect the outputs of all ranks, and remove finished requests from the ranks."""
        distinct = self._request_ranks.distinct(by_rank)
        # SGLang steps an aborted request once more.
        outputs = [output for own in distinct for output in own if output.engine_id in self._running]
        self._request_ranks.remove([output.engine_id for output in outputs if output.finish_reason is not None])
        return outputs

    def _cancel(self, engine_ids: Sequence[str]) -> None:
        self._request_ranks.remove(engine_ids)
        self._ranks.call("abort", list(engine_ids))

    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        by_rank = self._request_ranks.distinct(self._ranks.call("routing_of", list(engine_ids)))
        routing = {engine_id: experts for own in by_rank for engine_id, experts in own.items()}
        # The ranks are one token ahead while results are held.
        return {engine_id: rows[: self._running[engine_id].num_routed] for engine_id, rows in routing.items()}

    def _sets_of(
        self, wanted: Mapping[str, tuple[int, int]], ended: Sequence[str]
    ) -> Mapping[str, Sequence[np.ndarray]]:
        by_rank = self._request_ranks.distinct(self._ranks.call("sets_of", dict(wanted), list(ended)))
        sets = {engine_id: own for each in by_rank for engine_id, own in each.items()}
        if missing := sorted(wanted.keys() - sets.keys()):
            raise RuntimeError(f"no rank of the engine recorded the sampling sets of {missing[:10]}")
        return sets


def follow(settings: EngineSettings) -> None:
    """See engines.vllm.engine.follow. The ranks receive settings and commands from the first host."""
    hosts, num_ranks = settings.hosts, settings.rollout_config.tp
    address = f"{hosts.address}:{hosts.commands_port}"
    ranks = [start_rank(rank, num_ranks, address, hosts.key, _device()) for rank in hosts.ranks(num_ranks)]
    try:
        # Ranks have no connection to this process: only their exit codes show that they ended.
        while all(rank.exit_code is None for rank in ranks):
            time.sleep(0.2)
    finally:
        kill_all(ranks)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
