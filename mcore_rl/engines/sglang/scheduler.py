"""SGLang 0.5.23's scheduler, one per rank, stepped from outside (runs in SGLang's environment).

All ranks of an engine must receive the same calls in the same order: a step is a collective. Only the requests of `add`
differ, with attention data parallelism.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from mcore_rl.engines.rank_memory import RankMemory
from mcore_rl.engines.sglang import float32_routers
from mcore_rl.engines.sglang.devices.interface import Device
from mcore_rl.engines.sglang.devices.memory import kv_caches
from mcore_rl.engines.sglang.finish_signal import FinishSignal
from mcore_rl.engines.sglang.images import ImageInputs, accept_current_names, forget_features
from mcore_rl.engines.sglang.internals import check_scheduler, check_signatures
from mcore_rl.engines.sglang.routing import Routing
from mcore_rl.engines.sglang.sampler import install
from mcore_rl.engines.sglang.schedules import BatchSchedule, OverlapSchedule
from mcore_rl.engines.sglang.set_capture import SetCapture
from mcore_rl.engines.sglang.settings import NewRequest, RankSettings
from mcore_rl.engines.sglang.weights import ParameterLoader
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.model_map import model_shard_map
from mcore_rl.weights.slices.stacked_parts import loaded_tensors
from mcore_rl.weights.transports.segments import SHARED_MEMORY

_UNUSED = ("input_text", "input_embeds", "token_type_ids", "token_ids_logprob")
"""Fields that SGLang's request class requires and that stay None."""


class _OutputCollector:
    """Replaces a socket: collects the outputs that the scheduler sends."""

    def __init__(self) -> None:
        self._outputs: list[BatchTokenIDOutput] = []

    def send_output(self, output: BatchTokenIDOutput, recv_obj: object = None) -> None:
        self._outputs.append(output)

    def take(self) -> list[BatchTokenIDOutput]:
        taken, self._outputs = self._outputs, []
        return taken


class SteppedScheduler(RankMemory):
    """SGLang's scheduler and model of one rank.

    Raises: SGLang's error for a model or settings that it does not support.
    """

    def __init__(self, settings: RankSettings, device: Device) -> None:
        check_signatures()
        if settings.float32_router:
            float32_routers.install()
        self._device = device
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = settings.init_method
        arguments = ServerArgs(**settings.server_arguments)
        device.complete(arguments)
        accept_current_names()
        arguments.resolve_once()
        arguments.check_server_args()
        self.rank = rank = settings.rank
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=device.gpu_id))
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
        device.adapt(self._scheduler)
        # SGLang's event loop, which is not used here, would call this before its first step.
        self._scheduler.metrics_reporter.start_scheduler_time_accounting()
        self._routing = Routing(self._scheduler) if arguments.enable_return_routed_experts else None
        self._layout = EngineLayout.of_ranks(
            settings.num_ranks,
            expert_parallel=arguments.ep_size > 1,
            data_parallel_attention=arguments.attn_dp_size > 1,
        )
        # Tensor-parallel ranks sample the same tokens: the first one records.
        self._sets = SetCapture() if settings.keep_sets and rank % self._layout.tp == 0 else None
        schedule = BatchSchedule if arguments.disable_overlap_schedule else OverlapSchedule
        self._schedule = schedule(self._scheduler, self._sets)
        install(self._scheduler.tp_worker.model_runner, self._sets)
        self._images = ImageInputs.of(self._scheduler.model_config)
        self._finish = FinishSignal()
        if self._layout.dp > 1:
            self._finish.install()
        self._loader = ParameterLoader(self._scheduler.tp_worker.model_runner.model, device.torch_device)
        if arguments.load_format == "dummy":  # updates will follow
            dtype = getattr(torch, arguments.dtype)
            self._loader.record(loaded_tensors(model_shard_map(arguments.model_path, dtype, self._layout)))
        self._memory = device.memory(self._scheduler, self)

    @property
    def vocab_size(self) -> int:
        return int(self._scheduler.model_config.vocab_size)

    def graph_batch_sizes(self) -> list[int]:
        """Return the batch sizes for which decoding has a CUDA graph."""
        return list(self._scheduler.tp_worker.model_runner.decode_cuda_graph_capture_bs)

    def stream(self) -> AbstractContextManager[object]:
        """Return the context of every later call of this rank."""
        return self._device.stream(self._scheduler)

    def release(self, parts: Sequence[str], keep_weights: bool) -> int:
        """See SleepMemory.release. Collective."""
        return self._memory.release(parts, keep_weights=keep_weights)

    def restore(self, part: str) -> None:
        """See SleepMemory.restore. Collective."""
        self._memory.restore(part)

    def reset_prefix_cache(self, recompute: bool) -> bool:
        """Empty the prefix cache. Returns whether it is empty now.

        With `recompute`, running requests are retracted and compute their KV cache again; otherwise SGLang empties the
        cache only if no request is running.
        """
        if recompute:
            with self._schedule.drained():
                self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        forget_features()
        try:
            # empty_cache=True would add 0.4 s of garbage collection.
            return bool(self._scheduler.flush_cache(empty_cache=False))
        finally:
            if recompute:
                self._scheduler.continue_generation(ContinueGenerationReqInput())

    def is_idle(self) -> bool:
        return bool(self._scheduler.is_fully_idle())

    def add(self, requests: Sequence[NewRequest]) -> None:
        if self._sets is not None:
            self._sets.add(request.engine_id for request in requests if request.keep_sets)
        for request in requests:
            params = SamplingParams(**request.sampling)
            params.normalize(None)
            params.verify(self.vocab_size)
            self._scheduler.process_input_requests(
                [
                    TokenizedGenerateReqInput(
                        rid=request.engine_id,
                        input_ids=array("q", request.token_ids),
                        sampling_params=params,
                        return_logprob=True,
                        logprob_start_len=-1,
                        top_logprobs_num=0,
                        stream=True,
                        return_routed_experts=self._routing is not None,
                        extra_key=request.salt,
                        mm_inputs=self._images_of(request),
                        **dict.fromkeys(_UNUSED),
                    )
                ]
            )

    def _images_of(self, request: NewRequest) -> MultimodalProcessorOutput | None:
        if request.images is None:
            return None
        assert self._images is not None
        num_tokens = len(request.token_ids) + int(str(request.sampling["max_new_tokens"]))
        return self._images.of_request(request.images, num_tokens, request.salt)

    def abort(self, engine_ids: Sequence[str]) -> None:
        """Abort requests. Running requests take part in one more step."""
        if self._sets is not None:
            self._sets.forget(engine_ids)
        for engine_id in engine_ids:
            self._scheduler.process_input_requests([AbortReq(rid=engine_id)])

    @torch.inference_mode()
    def steps(self, limit: int) -> list[StepOutput]:
        """Return the results of up to `limit` batches, until a request finishes. One output per request with new
        tokens.

        With the overlap schedule, the batch after the last one may be in flight at the end.
        All ranks stop after the same batch. Tensor-parallel ranks sample the same tokens, and only the first has
        outputs. With attention data parallelism, ranks learn in the next batch that a request of another rank has
        finished.
        """
        merged: dict[str, StepOutput] = {}
        self._finish.reset()
        if self._routing is not None:
            self._routing.forget()
        for _ in range(limit):
            finished = self._schedule.run()
            for output in self._take_outputs():
                if (earlier := merged.setdefault(output.engine_id, output)) is not output:
                    merged[output.engine_id] = earlier.followed_by(output)
            if self._layout.dp > 1:
                finished = self._finish.everywhere(finished)
            # Idle on all ranks: if one has a batch, the others have an empty one.
            if finished or self._schedule.is_idle:
                break
        return list(merged.values())

    @torch.inference_mode()
    def drain(self) -> list[StepOutput]:
        """Return the results of the batch in flight, which was computed with the current weights."""
        return self._take_outputs() if self._schedule.drain() else []

    def _take_outputs(self) -> list[StepOutput]:
        # Requests that were aborted while waiting produce outputs of another type, without output_ids. An idle batch
        # produces an output without requests.
        outputs = [output for output in self._outputs.take() if hasattr(output, "output_ids") and output.rids]
        if self._routing is not None:
            self._routing.keep(outputs)
        return [result for output in outputs for result in _rank_outputs(output)]

    def routing_of(self, engine_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """See SteppedEngine._routing_of. Experts of finished requests are available until the next call of `steps`."""
        assert self._routing is not None
        return self._routing.of(engine_ids)

    def sets_of(self, wanted: Mapping[str, tuple[int, int]], ended: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """See SteppedEngine._sets_of. Requests of other data-parallel ranks are absent; {} on ranks that do not
        record."""
        if self._sets is None:
            return {}
        taken = self._sets.take(wanted)
        self._sets.forget(ended)
        return taken

    def _kv_caches(self) -> list[torch.Tensor]:
        return kv_caches(self._scheduler)


def _rank_outputs(output: BatchTokenIDOutput) -> list[StepOutput]:
    rows = zip(output.rids, output.output_ids, output.output_token_logprobs_val, output.finished_reasons, strict=True)
    return [
        StepOutput(engine_id, list(ids), list(logp), None if reason is None else str(reason["type"]))
        for engine_id, ids, logp, reason in rows
    ]
