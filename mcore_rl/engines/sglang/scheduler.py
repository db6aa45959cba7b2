"""SGLang 0.5.23's scheduler, one per rank, stepped from outside (runs in SGLang's environment).

All ranks of an engine must receive the same calls in the same order: a step is a collective.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from mcore_rl.engines.kv_memory import free_storages, restore_storages
from mcore_rl.engines.sglang.internals import check_scheduler, check_signatures
from mcore_rl.engines.sglang.routing import Routing
from mcore_rl.engines.sglang.sampler import install
from mcore_rl.engines.sglang.settings import NewRequest, RankSettings
from mcore_rl.engines.sglang.weights import RankWeights
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.segments import device_uuid
from mcore_rl.weights.transports.topology import Endpoint

SHARED_MEMORY = Path("/dev/shm")
SPARE_TOKENS = 6
"""Tokens added to SGLang's context length. It truncates responses two tokens before the end of the context, and rejects
prompts (including a partial response) that reach into its last six tokens (tp_worker.py, scheduler.py)."""


class _OutputCollector:
    """Replaces a socket: collects the outputs that the scheduler sends."""

    def __init__(self) -> None:
        self._outputs: list[BatchTokenIDOutput] = []

    def send_output(self, output: BatchTokenIDOutput, recv_obj: object = None) -> None:
        self._outputs.append(output)

    def take(self) -> list[BatchTokenIDOutput]:
        taken, self._outputs = self._outputs, []
        return taken


class SteppedScheduler(RankWeights):
    """SGLang's scheduler and model of one rank.

    Raises: SGLang's error for a model or settings that it does not support.
    """

    def __init__(self, settings: RankSettings) -> None:
        check_signatures()
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = settings.init_method
        arguments = ServerArgs(**_server_arguments(settings))
        arguments.resolve_once()
        arguments.check_server_args()
        rank = settings.rank
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
        nowhere = f"ipc://nowhere-{os.getpid()}"  # never bound, never written
        instance = f"mcore{os.getpid()}"
        ports = PortArgs(nowhere, nowhere, nowhere, 0, nowhere, nowhere, None, None, instance_id=instance)
        try:
            self._scheduler = Scheduler(arguments, ports)
        finally:
            for path in SHARED_MEMORY.glob(f"sglang_loads_{instance}_*"):  # SGLang never removes it
                path.unlink(missing_ok=True)
        check_scheduler(self._scheduler)
        # Collect outputs in memory instead of sending them to SGLang's detokenizer and tokenizer processes.
        self._outputs = _OutputCollector()
        self._scheduler.output_streamer.send_to_detokenizer = self._outputs
        self._scheduler.ipc_channels.send_to_tokenizer.send_output = self._outputs.send_output
        # On CPU there is no stream to synchronize, and no overlapping batch that the barrier would protect.
        self._scheduler.schedule_stream.synchronize = lambda: None
        self._scheduler._war_barrier_enabled = False
        # SGLang's event loop, which is not used here, would call this before its first step.
        self._scheduler.metrics_reporter.start_scheduler_time_accounting()
        self._routing = Routing(self._scheduler) if settings.captures_routing else None
        install(self._scheduler.tp_worker.model_runner)
        model = self._scheduler.tp_worker.model_runner.model
        super().__init__(model, rank, EngineLayout(settings.num_ranks), torch.device("cpu"))

    @property
    def vocab_size(self) -> int:
        return int(self._scheduler.model_config.vocab_size)

    def endpoint(self) -> Endpoint:
        """Return this rank's endpoint for weight updates."""
        return Endpoint(this_host(), os.environ.get("VLLM_HOST_IP", "127.0.0.1"), device_uuid())

    def reset_prefix_cache(self, recompute: bool) -> bool:
        """Empty the prefix cache. Returns whether it is empty now.

        With `recompute`, running requests are retracted and compute their KV cache again; otherwise SGLang empties the
        cache only if no request is running.
        """
        if recompute:
            self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        try:
            # empty_cache=True would add 0.4 s of garbage collection.
            return bool(self._scheduler.flush_cache(empty_cache=False))
        finally:
            if recompute:
                self._scheduler.continue_generation(ContinueGenerationReqInput())

    def release_kv_cache(self) -> int:
        """Free the memory of the KV cache but keep its tensors. Returns the freed bytes."""
        pool = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        lists = [getattr(pool, name, None) or [] for name in ("k_buffer", "v_buffer", "kv_buffer")]
        self._freed = free_storages(tensor for tensors in lists for tensor in tensors)
        return sum(num_bytes for _, num_bytes in self._freed)

    def restore_kv_cache(self) -> None:
        restore_storages(self._freed)

    def is_idle(self) -> bool:
        return bool(self._scheduler.is_fully_idle())

    def add(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            params = SamplingParams(
                max_new_tokens=request.max_new_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                stop_token_ids=request.stop_token_ids,
                ignore_eos=not request.stop_token_ids,
                sampling_seed=request.seed,
            )
            params.normalize(None)
            params.verify(self.vocab_size)
            self._scheduler.process_input_requests(
                [
                    TokenizedGenerateReqInput(
                        rid=request.engine_id,
                        input_text=None,
                        input_ids=array("q", request.token_ids),
                        input_embeds=None,
                        mm_inputs=None,
                        token_type_ids=None,
                        sampling_params=params,
                        return_logprob=True,
                        logprob_start_len=-1,
                        top_logprobs_num=0,
                        token_ids_logprob=None,
                        stream=True,
                        return_routed_experts=self._routing is not None,
                        extra_key=request.salt,
                    )
                ]
            )

    def abort(self, engine_ids: Sequence[str]) -> None:
        """Abort requests. Running requests take part in one more step."""
        for engine_id in engine_ids:
            self._scheduler.process_input_requests([AbortReq(rid=engine_id)])

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one batch: the body of Scheduler.event_loop_normal."""
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()
        scheduler.last_batch = batch
        # Requests that were aborted while waiting produce outputs of another type, without output_ids.
        outputs = [output for output in self._outputs.take() if hasattr(output, "output_ids")]
        if self._routing is not None:
            self._routing.keep(outputs)
        return [result for output in outputs for result in _rank_outputs(output)]

    def routing_of(self, engine_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """See SteppedEngine._routing_of. Experts of finished requests are available until the next step."""
        assert self._routing is not None
        return self._routing.of(engine_ids)


def _rank_outputs(output: BatchTokenIDOutput) -> list[StepOutput]:
    rows = zip(output.rids, output.output_ids, output.output_token_logprobs_val, output.finished_reasons, strict=True)
    return [
        StepOutput(engine_id, list(ids), list(logp), None if reason is None else str(reason["type"]))
        for engine_id, ids, logp, reason in rows
    ]


def _server_arguments(settings: RankSettings) -> dict[str, object]:
    arguments: dict[str, object] = {
        "model_path": settings.model,
        "json_model_override_args": json.dumps(settings.overrides),
        "device": "cpu",
        "dtype": settings.dtype,
        "load_format": "auto" if settings.load_weights else "dummy",
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": True,  # with overlap a step returns the previous batch
        "context_length": settings.context_tokens + SPARE_TOKENS,
        "max_running_requests": settings.max_requests,
        "tp_size": settings.num_ranks,
        "random_seed": settings.seed,
        "log_level": "error",
        "enable_return_routed_experts": settings.captures_routing,
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,  # only an upper bound of max_total_tokens
        "max_total_tokens": _cache_tokens(settings),
    }
    if settings.max_batched_tokens is not None:
        arguments["chunked_prefill_size"] = settings.max_batched_tokens
    return arguments


def _cache_tokens(settings: RankSettings) -> int:
    """Return the number of tokens that fit in the KV cache."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model)
    size = torch.finfo(getattr(torch, settings.dtype)).bits // 8
    heads = config.num_key_value_heads // settings.num_ranks
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * heads * head_dim * config.num_hidden_layers * size
    return int(settings.kv_cache_bytes // bytes_per_token)
