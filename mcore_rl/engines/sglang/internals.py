"""Check of SGLang's internal names and signatures that engines.sglang uses (runs in SGLang's environment).

The required version is exact, but a different build or a patched one would otherwise fail in the middle of a run, or
silently do something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter

from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

Call = tuple[Callable[..., object], int, tuple[str, ...]]
"""A callable, its number of positional arguments (including `self`), and its keyword arguments."""

CALLS: tuple[Call, ...] = (
    (ServerArgs.resolve_once, 1, ()),
    (ServerArgs.check_server_args, 1, ()),
    (PortArgs, 8, ("instance_id",)),
    (SpawnRanks, 0, ("world_rank", "dp_rank", "gpu_id")),
    (publish, 1, ("role", "ranks")),
    (Scheduler, 2, ()),
    (Scheduler.get_next_batch_to_run, 1, ("running_batch", "last_batch")),
    (Scheduler.run_batch, 2, ()),
    (Scheduler.process_batch_result, 3, ()),
    (Scheduler.process_input_requests, 2, ()),
    (Scheduler.on_idle, 1, ()),
    (Scheduler._apply_war_barrier, 1, ()),
    (ScheduleBatch.copy, 1, ()),
    (Req.finished, 1, ()),
    (Scheduler.is_fully_idle, 1, ()),
    (Scheduler.collect_inflight_reqs, 1, ()),
    (Scheduler.flush_cache, 1, ("empty_cache",)),
    (Scheduler.pause_generation, 2, ()),
    (Scheduler.continue_generation, 2, ()),
    (PauseGenerationReqInput, 0, ("mode",)),
    (ContinueGenerationReqInput, 0, ()),
    (AbortReq, 0, ("rid",)),
    (ReleaseMemoryOccupationReqInput, 0, ("tags",)),
    (ResumeMemoryOccupationReqInput, 0, ("tags",)),
    (
        TokenizedGenerateReqInput,
        0,
        (
            "rid", "input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids", "sampling_params",
            "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "stream",
            "return_routed_experts", "extra_key",
        ),
    ),
    (
        SamplingParams,
        0,
        (
            "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids",
            "ignore_eos", "sampling_seed",
        ),
    ),
    (SamplingParams.normalize, 2, ()),
    (SamplingParams.verify, 2, ()),
    (DefaultModelLoader.restore_weights_before_loading, 2, ()),
    (DefaultModelLoader.postprocess_weights, 2, ()),
)  # fmt: skip
REPLACED: tuple[Call, ...] = (
    (Sampler._sample_from_probs, 5, ()),
    (SamplingBatchInfo.from_schedule_batch, 2, ()),
    (MLPSyncBatchInfo.all_gather, 1, ("device", "group", "use_all_reduce")),
)
"""SGLang's functions that are replaced, with the arguments that SGLang passes to them."""

SCHEDULER_ATTRIBUTES = (
    "output_streamer.send_to_detokenizer.send_output",
    "ipc_channels.send_to_tokenizer.send_output",
    "schedule_stream",
    "metrics_reporter.start_scheduler_time_accounting",
    "running_batch",
    "last_batch",
    "result_queue",
    "enable_overlap",
    "enable_skip_finishing_decode",
    "forward_stream",
    "req_to_token_pool.req_to_token",
    "weight_updater.release_memory_occupation",
    "weight_updater.resume_memory_occupation",
    "token_to_kv_pool_allocator.get_kvcache",
    "model_config.vocab_size",
    "tp_worker.model_runner.model",
    "tp_worker.model_runner.sampler",
)
"""Attributes that are read or overwritten. Setting a missing one would silently have no effect."""


def check_signatures() -> None:
    """Raise RuntimeError naming a function with another signature."""
    for function, by_place, by_name in (*CALLS, *REPLACED):
        try:
            # bind checks only the number and the names of the arguments, not their values.
            inspect.signature(function).bind(*range(by_place), **dict.fromkeys(by_name))
        except TypeError as error:
            name = f"{function.__module__}.{function.__qualname__}"
            raise RuntimeError(f"{name} differs from SGLang's release ({error})") from None


def check_scheduler(scheduler: object) -> None:
    """Raise RuntimeError naming an attribute that the scheduler lacks."""
    for path in SCHEDULER_ATTRIBUTES:
        try:
            attrgetter(path)(scheduler)
        except AttributeError as error:
            raise RuntimeError(f"SGLang's scheduler lacks {path} ({error}): it differs from SGLang's release") from None
