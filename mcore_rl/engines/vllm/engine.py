"""vLLM as a ports.Engine. The engine core runs in this process and is stepped from here."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mcore_rl.config.sampling import NO_DRAFTS
from mcore_rl.engines.grammars.compiler import FormatCompiler
from mcore_rl.engines.rank_engine import RankEngine
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.engines.stepped_engine import ActiveRequest
from mcore_rl.engines.vllm.arguments import engine_arguments, sampling_arguments, set_environment
from mcore_rl.engines.vllm.images import image_features
from mcore_rl.engines.vllm.optional_imports import check_imports, import_without_lowering, inspect_models_here
from mcore_rl.engines.vllm.ranks import EngineRanks, unlink_queues
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.ports import Engine, TokenScorer
from mcore_rl.processes.large_imports import first_import
from mcore_rl.types import (
    DraftCounts,
    GenerationRequest,
    JsonFormat,
    SamplingOptions,
    TokenScores,
    TokenSequence,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.llm_engine import LLMEngine


class VllmEngine(RankEngine):
    """vLLM engine.

    Raises: ConfigError for settings that vLLM does not support.
    """

    _ranks: EngineRanks

    def __init__(self, settings: EngineSettings) -> None:
        set_environment(settings.timeout_seconds)
        super().__init__(settings)
        self._routed: dict[str, list[np.ndarray]] = defaultdict(list)
        """Experts that vLLM has returned so far, by request. GPUs only."""
        self._engine = _start(settings)
        self._core = self._engine.engine_core
        if (drafts := settings.rollout_config).draft != NO_DRAFTS:
            self._draft_counts = DraftCounts.zero(drafts.draft_tokens)
            # The scheduler calls this for every verified draft, whether vLLM collects statistics or not.
            scheduler = self._core.engine_core.scheduler
            scheduler.make_spec_decoding_stats = self._count_draft
            if not scheduler.scheduler_config.enable_chunked_prefill:
                # vLLM has raised the limit of a pass so that every prompt fits, but not this one, which it sets for
                # drafts only. A longer prompt would wait forever.
                scheduler.max_num_scheduled_tokens = scheduler.scheduler_config.max_num_batched_tokens
        self._ranks = EngineRanks(self._engine, settings.name, settings.timeout_seconds, settings.hosts.names[1:])
        # All ranks have mapped the message queues now.
        self._ranks.call("unlink_queues")
        unlink_queues()
        self._ranks.call("write_stacks", os.getpid())
        self._ranks.call("prepare_worker")
        if settings.capture_routing and not torch.cuda.is_available():
            self._ranks.call("start_routing_capture")
        self._captures_sets = settings.rollout_config.keep_sampling_mask
        if self._captures_sets:
            self._ranks.call("start_set_capture")
        self._routed_layers = self._ranks.call("routed_layers")[0] if settings.capture_routing else None
        self.vocab_size = self._engine.model_config.get_vocab_size()
        self._formats = FormatCompiler(settings.tokenizer, self.vocab_size, settings.eos_token_ids)
        # vLLM's manager masks the logits and advances the grammars; it would create its own grammars with a tokenizer.
        self._core.engine_core.structured_output_manager.backend = MaskMemory(self.vocab_size)
        vision = getattr(self._engine.model_config.hf_config, "vision_config", None)
        self._merge_size: int | None = None if vision is None else vision.spatial_merge_size

    def score(self, sequences: Sequence[TokenSequence], top_k: int) -> list[TokenScores]:
        """Implement ports.TokenScorer.score. Nothing else may be running. vLLM also samples one token after each
        sequence, which is ignored."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._require_awake()
        # vLLM reads no prefix cache for these requests, because it would not compute the logits of cached tokens.
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=top_k, detokenize=False)
        found: dict[int, TokenScores] = {}
        try:
            for number, sequence in enumerate(sequences):
                self._core.add_request(
                    EngineCoreRequest(
                        request_id=str(number),
                        prompt_token_ids=sequence.token_ids.tolist(),
                        mm_features=None,
                        sampling_params=copy(sampling),
                        pooling_params=None,
                        arrival_time=0.0,
                        lora_request=None,
                        cache_salt=None,
                        data_parallel_rank=None,
                    )
                )
            while len(found) < len(sequences):
                with self._ranks.waiting("execute_model"):
                    outputs = self._core.get_output().outputs
                for output in outputs:
                    if (tensors := output.new_prompt_logprobs_tensors) is not None:
                        number = int(output.request_id)
                        # Row i is about token i + 1: the token itself, then the most probable ones.
                        rows = slice(sequences[number].start - 1, None)
                        ids, logp = (each[rows].numpy() for each in (tensors.logprob_token_ids, tensors.logprobs))
                        found[number] = TokenScores.of(logp[:, 0], ids[:, 1:], logp[:, 1:])
        finally:
            self._core.abort_requests([str(number) for number in range(len(sequences))])
        return [found[number] for number in range(len(sequences))]

    def _release(self, *, keep_weights: bool) -> int:
        """Use vLLM's sleep mode on GPUs: level 1 (weights to host memory) or 2 (weights discarded).

        vLLM 0.32 has no sleep mode on CPU.
        """
        if not torch.cuda.is_available():
            return super()._release(keep_weights=keep_weights)
        free = sum(self._ranks.call("free_device_bytes"))
        with self._ranks.waiting("sleep"):
            self._engine.sleep(level=1 if keep_weights else 2)
        return sum(self._ranks.call("free_device_bytes")) - free

    def _restore(self, part: str) -> None:
        if torch.cuda.is_available():
            with self._ranks.waiting("wake_up"):
                self._engine.wake_up(tags=[part])
        else:
            super()._restore(part)

    def shutdown(self) -> None:
        """End the engine's processes and free its memory. Call once."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._core.shutdown()
        cleanup_dist_env_and_memory()

    def _empty_prefix_cache(self, recompute: bool) -> bool:
        emptied = bool(self._core.reset_prefix_cache(reset_running_requests=recompute))
        if recompute and self._merge_size is not None:
            # Running requests compute their prompts again, and must not find features of the earlier vision tower.
            self._core.reset_encoder_cache()
        return emptied

    def prepare_format(self, form: JsonFormat) -> None:
        """Implement ports.Engine.prepare_format."""
        self._formats.prepare(form)

    def _add(self, added: Mapping[str, ActiveRequest]) -> None:
        from vllm.v1.engine import EngineCoreRequest

        for engine_id, entry in added.items():
            request = entry.request
            sampling_params = copy(_sampling_params(request.sampling, tuple(self._settings.eos_token_ids)))
            # For vLLM a partial response is part of the prompt.
            sampling_params.max_tokens -= len(entry.token_ids)
            # A seed makes vLLM create a generator, which greedy requests do not need.
            if request.sampling.temperature > 0:
                sampling_params.seed = request.seed
            core_request = EngineCoreRequest(
                request_id=engine_id,
                prompt_token_ids=request.token_ids.tolist() + entry.token_ids,
                mm_features=self._image_features(request),
                sampling_params=sampling_params,
                pooling_params=None,
                # Equal times: the scheduler then keeps the order of submission.
                arrival_time=0.0,
                lora_request=None,
                cache_salt=f"version {self.weight_version}",
                data_parallel_rank=None,
            )
            if request.sampling.format is None:
                self._core.add_request(core_request)
            else:
                self._add_with_format(core_request, request.sampling.format, entry.token_ids)

    def _add_with_format(self, core_request: EngineCoreRequest, form: JsonFormat, begun: Sequence[int]) -> None:
        """Add a request whose format is prepared. `begun`: tokens that its response has."""
        from vllm.v1.structured_output.request import StructuredOutputRequest

        core = self._core.engine_core
        added, wave = core.preprocess_add_request(core_request)
        added.structured_output_request = StructuredOutputRequest(None, self._formats.matcher(form, begun))
        core.add_request(added, wave)

    def _image_features(self, request: GenerationRequest) -> list[MultiModalFeatureSpec] | None:
        if request.images is None:
            return None
        if self._merge_size is None:
            raise DataError(f"prompt {request.request_id} has images, but the model reads text only")
        return image_features(request.images, self._merge_size, self.weight_version)

    def _run_step(self, limit: int) -> list[StepOutput]:
        # One pass per call: rank 0 is in this process, so calls cost nothing.
        with self._ranks.waiting("execute_model"):
            outputs = self._core.get_output().outputs
        if torch.cuda.is_available():
            for output in outputs:
                if output.routed_experts is not None:
                    self._routed[output.request_id].append(output.routed_experts)
        return [
            StepOutput(
                output.request_id,
                list(output.new_token_ids),
                [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist(),
                None if output.finish_reason is None else str(output.finish_reason),
            )
            for output in outputs
        ]

    def _limit_drafts(self, max_tokens: float) -> None:
        # A pass samples one token more than the draft has. The scheduler has received the drafts after the last pass.
        if self._draft_counts is not None and max_tokens <= self._settings.rollout_config.draft_tokens:
            for request in self._core.engine_core.scheduler.running:
                request.spec_token_ids = request.spec_token_ids[: int(max_tokens) - 1]

    def _count_draft(self, _stats: object, num_draft_tokens: int, num_accepted_tokens: int, **_: object) -> None:
        """Replace Scheduler.make_spec_decoding_stats."""
        assert self._draft_counts is not None
        self._draft_counts = self._draft_counts.with_draft(num_draft_tokens, num_accepted_tokens)

    def _cancel(self, engine_ids: Sequence[str]) -> None:
        self._core.abort_requests(list(engine_ids))
        for engine_id in engine_ids:
            self._routed.pop(engine_id, None)
        if self._captures_sets and engine_ids:
            self._ranks.call("forget_sets", list(engine_ids))

    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        if torch.cuda.is_available():  # one array per step, with rows for layers without experts too
            joined = {i: np.concatenate(self._routed.pop(i))[:, self._routed_layers] for i in engine_ids}
            return {i: rows.astype(np.int16) if rows.dtype == np.uint16 else rows for i, rows in joined.items()}
        # A preempted request has no blocks in the KV cache until it runs again.
        preempted = {request.request_id for request in self._core.engine_core.scheduler.waiting}
        wanted = {i: self._running[i].num_routed for i in engine_ids if i not in preempted}
        routing: dict[str, np.ndarray] = self._ranks.call("routing_of_requests", wanted)[0]
        return routing

    def _sets_of(
        self, wanted: Mapping[str, tuple[int, int]], ended: Sequence[str]
    ) -> Mapping[str, Sequence[np.ndarray]]:
        sets: dict[str, list[np.ndarray]] = self._ranks.call("sets_of_requests", dict(wanted), list(ended))[0]
        return sets


@dataclass(frozen=True)
class MaskMemory:
    """Part of vLLM's StructuredOutputBackend that its manager calls for grammars that are created elsewhere."""

    vocab_size: int

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        from mcore_rl.engines.grammars.matcher import allocate

        return allocate(max_num_seqs, self.vocab_size)

    def destroy(self) -> None:
        """Do nothing: the masks are freed with their manager."""


def _start(settings: EngineSettings) -> LLMEngine:
    check_imports(settings.model_dir)
    with first_import("vllm"):
        import_without_lowering()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(settings)
        inspect_models_here()
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except ValueError as error:
        names = settings.names
        # vLLM raises ValueError for every mistake; only the text shows that the cache is too small.
        if "cache" in str(error):
            name = "gpu_memory_fraction" if torch.cuda.is_available() else "kv_cache_gib"
            size = f"{names.key(name)} ({getattr(settings.rollout_config, name):g})"
            raise ConfigError(f"{size} is too small: {error}") from error
        raise ConfigError(f"vLLM cannot run this model with this {names.prefix} section: {error}") from error


@functools.lru_cache(maxsize=256)
def _sampling_params(options: SamplingOptions, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """Create SamplingParams, cached. Callers copy them: creation takes as long as all other work to add a request."""
    from vllm import SamplingParams

    return SamplingParams(**sampling_arguments(options, eos_token_ids))


def follow(settings: EngineSettings) -> None:
    """Run the engine's ranks on a host other than its first. Returns when one of them has ended.

    The scheduler on the first host controls the ranks. The end of its process is not detected here: the caller must
    terminate this process then.
    """
    set_environment(settings.timeout_seconds)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    vllm_config = EngineArgs(**engine_arguments(settings)).create_engine_config(headless=True)
    executor = MultiprocExecutor(vllm_config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)


if TYPE_CHECKING:
    _port: type[Engine] = VllmEngine
    _scorer: type[TokenScorer] = VllmEngine
