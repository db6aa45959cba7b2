"""Rules for keys of the rollout: episodes and tools, sampling, and asynchronous training."""

from __future__ import annotations

import os

from mcore_rl.config.algorithm import COMPARING_ADVANTAGES, AlgorithmConfig, is_supervised
from mcore_rl.config.episodes import GATEWAY, SERVING, SINGLE_TURN, WITH_ENVIRONMENT, WITH_GATEWAY, WITH_TOOLS
from mcore_rl.config.fields import reject_unless_default, written
from mcore_rl.config.functions import names_function
from mcore_rl.config.models import ActorConfig
from mcore_rl.config.rules.gateway import check_gateway, takes_options
from mcore_rl.config.rules.teacher import is_on_engines
from mcore_rl.config.sampling import MTP, NGRAM, NO_DRAFTS
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.config.staleness import FINISH, RECOMPUTE
from mcore_rl.errors import ConfigError

TURN_KEYS = (
    *("max_turns", "max_turn_tokens", "max_episode_seconds", "max_concurrent_episodes"),
    *("failed_reward", "history", "long_history"),
)
"""Keys that have no effect on single-turn episodes."""
TOOL_KEYS = (
    *("tool_parser", "tool_processes", "max_tool_seconds", "max_tool_calls_per_turn"),
    *("tool_answer_characters", "tool_answer_images", "tool_answer_keep"),
)
"""Keys that have no effect without tools."""
EPISODES_PER_REQUEST = 4
"""Default number of running episodes per request that an engine decodes."""
MIN_TEMPERATURE = 0.01
"""vLLM 0.32 raises lower temperatures to this one without an error (sampling_params.py)."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
"""MAX_STOPS and MAX_STOP_CHARACTERS bound the work per sampled token."""
_TRUNCATES = "samples from fewer tokens than the full softmax that the trainer computes"
_IS_CERTAIN = "leaves one token, whose log-probability is 0 and has no gradient"
_KEEP_MASK = "rollout.keep_sampling_mask=true"
_PENALISES = "changes the probabilities of earlier tokens, unlike the softmax that the trainer computes"
STARTUP_PLAN = "VLLM_ENABLE_STARTUP_PLAN"
ASYNCHRONOUS_KEYS = ("max_staleness_hard", "swap", "partial_tokens", "replay_schedule")


def episode_of(rollout: RolloutConfig) -> str:
    """Return the value of rollout.episode, or of its default."""
    if rollout.episode is not None:
        return rollout.episode
    if rollout.environment is not None:
        return WITH_ENVIRONMENT
    return WITH_TOOLS if rollout.tools is not None else SINGLE_TURN


def has_turns(rollout: RolloutConfig) -> bool:
    """Return True if an episode may have more than one turn."""
    return episode_of(rollout) != SINGLE_TURN


def concurrent_episodes(rollout: RolloutConfig) -> int:
    """Return the maximum number of running episodes per engine; single turns are limited by the requests that it
    decodes."""
    if not has_turns(rollout):
        return rollout.max_concurrent_requests
    # More episodes than decoded requests, since some of them wait for tools.
    return rollout.max_concurrent_episodes or EPISODES_PER_REQUEST * rollout.max_concurrent_requests


def _check_algorithm(chosen: str, algorithm: AlgorithmConfig) -> None:
    """Reject keys of the algorithm that have no effect with the episode `chosen`."""
    if algorithm.baseline == "role" and not (names_function(chosen) or chosen in WITH_GATEWAY):
        raise ConfigError(
            f"algorithm.baseline=role has no effect with rollout.episode={chosen}, in which one role speaks; set the "
            "baseline to prompt, or rollout.episode to gateway or to module_or_file.py:name of an episode that names "
            "roles"
        )
    if chosen == SINGLE_TURN and algorithm.observation_coefficient:
        raise ConfigError(
            f"algorithm.observation_coefficient={algorithm.observation_coefficient}: all tokens of a single-turn "
            "response are sampled; set rollout.tools, rollout.environment or another rollout.episode, or set it to 0"
        )


def check_episodes(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for keys that contradict each other or have no effect."""
    chosen = episode_of(rollout)
    if rollout.tools is None:
        # Clients of the gateway bring their own tools, whose calls are parsed.
        unused = [name for name in TOOL_KEYS if name != "tool_parser" or chosen not in WITH_GATEWAY]
        reject_unless_default("rollout", rollout, "set rollout.tools", unused)
    if is_supervised(algorithm):
        return
    _check_algorithm(chosen, algorithm)
    if chosen == WITH_TOOLS and rollout.tools is None:
        raise ConfigError("rollout.episode=tools needs rollout.tools: a YAML file of tools, or module_or_file.py:name")
    if chosen == WITH_ENVIRONMENT and rollout.environment is None:
        raise ConfigError("rollout.episode=environment needs rollout.environment=module_or_file.py:name of its class")
    if rollout.environment is not None and chosen != WITH_ENVIRONMENT:
        raise ConfigError(
            f"rollout.environment={rollout.environment} is not used by rollout.episode={chosen}; remove one of them"
        )
    check_gateway(rollout, chosen)
    if rollout.tools is not None and chosen in (SINGLE_TURN, WITH_ENVIRONMENT, GATEWAY):
        raise ConfigError(f"rollout.tools={rollout.tools} is not used by rollout.episode={chosen}; remove it")
    if rollout.episode_kwargs and not takes_options(rollout, chosen):
        raise ConfigError(f"rollout.episode_kwargs is not used by rollout.episode={chosen}; remove it")
    if chosen == SINGLE_TURN:
        remedy = "set rollout.episode, rollout.tools or rollout.environment"
        reject_unless_default("rollout", rollout, remedy, TURN_KEYS)
    _check_limits(rollout)


def _check_limits(rollout: RolloutConfig) -> None:
    turn, response = rollout.max_turn_tokens, rollout.max_response_tokens
    if turn is not None and turn > response:
        raise ConfigError(
            f"rollout.max_turn_tokens={turn} exceeds rollout.max_response_tokens={response}, which counts all turns of "
            "an episode and the messages between them; lower it"
        )
    seconds, tool_seconds = rollout.max_episode_seconds, rollout.max_tool_seconds
    if seconds is not None and rollout.tools is not None and tool_seconds > seconds:
        raise ConfigError(
            f"rollout.max_tool_seconds={tool_seconds:g} exceeds rollout.max_episode_seconds={seconds:g}; lower it"
        )


def untrainable(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    keeps_mask: bool = False,
    of_row: bool = False,
) -> tuple[str, str] | None:
    """Return the option that makes the sampled distribution differ from the trained one, with the reason and remedy;
    None if they are equal. keeps_mask: rollout.keep_sampling_mask, with which truncation can be trained. of_row: the
    options are of a single row or call, and not of the run."""
    if not keeps_mask and (truncation := _truncation(top_p, top_k, min_p)) is not None:
        name, neutral, truncated = truncation
        # Only a run that truncates may keep the sets (_check_mask).
        also = f" and rollout.{name} {truncated}" if of_row else ""
        return name, f"{_TRUNCATES}; set it to {neutral}, or {_KEEP_MASK}{also}"
    if top_k == 1:
        return "top_k", f"{_IS_CERTAIN}; set it to at least 2, or to -1 (all tokens)"
    if repetition_penalty != 1:
        return "repetition_penalty", f"{_PENALISES}; set it to 1"
    if temperature == 0:
        return "temperature", "is greedy sampling, which has no distribution to train; set it above 0"
    if temperature < MIN_TEMPERATURE:
        return "temperature", f"is below {MIN_TEMPERATURE:g}, to which the engine raises it; set it to at least that"
    return None


def _truncation(top_p: float, top_k: int, min_p: float) -> tuple[str, str, str] | None:
    """Return the first option that truncates the distribution, with its value for all tokens and its values for fewer;
    None if there is none."""
    if top_p < 1:
        return "top_p", "1", "below 1"
    if top_k != -1:
        return "top_k", "-1", "of at least 2"
    return ("min_p", "0", "above 0") if min_p > 0 else None


def stop_fault(stops: object) -> str | None:
    """Return the reason why `stops` is not a valid list of stop strings; None if it is valid."""
    # Also called for options of single rows (data/sources/row_options.py), whose types no schema checks.
    if not isinstance(stops, list | tuple) or not all(isinstance(each, str) for each in stops):
        return "must be a text or a list of texts"
    if len(stops) > MAX_STOPS:
        return f"has {len(stops)} texts, but may have {MAX_STOPS}"
    if not all(stops):
        return "has an empty text, which would end every response at once; remove it"
    if max(map(len, stops), default=0) > MAX_STOP_CHARACTERS:
        return f"has a text of {max(map(len, stops))} characters, but may have {MAX_STOP_CHARACTERS} in each"
    return None


def check_sampling_keys(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError if training would sample from another distribution than the trained one, and for contradictory
    validation keys."""
    for name, value in (("top_k", rollout.top_k), ("validation_top_k", rollout.validation_top_k)):
        if value == 0:
            raise ConfigError(f"rollout.{name}=0 leaves no token; set it to -1 (all tokens) or to at least 1")
    if (fault := stop_fault(rollout.stop)) is not None:
        raise ConfigError(f"rollout.stop={written(rollout.stop)} {fault}")
    if rollout.validation_samples > 1 and rollout.validation_temperature == 0:
        raise ConfigError(
            f"rollout.validation_samples={rollout.validation_samples} greedy responses to a prompt would all be equal; "
            "set rollout.validation_temperature above 0, or one sample"
        )
    if is_supervised(algorithm) or episode_of(rollout) == SERVING:  # the samples are not trained
        return
    if rollout.temperature == 0 and algorithm.advantage in COMPARING_ADVANTAGES:
        raise ConfigError(
            f"rollout.temperature=0 makes all samples of a prompt equal, and algorithm.advantage="
            f"{algorithm.advantage} learns from their differences; set rollout.temperature above 0"
        )
    found = untrainable(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        keeps_mask=rollout.keep_sampling_mask,
    )
    if found is not None:
        name, reason = found
        raise ConfigError(
            f"rollout.{name}={getattr(rollout, name):g} {reason}. Validation may use rollout.validation_{name}"
        )
    if rollout.keep_sampling_mask:
        _check_mask(rollout, algorithm)


def truncates(rollout: RolloutConfig) -> bool:
    """Return True if training samples from a part of the vocabulary."""
    return rollout.top_p < 1 or rollout.top_k != -1 or rollout.min_p > 0


def _check_mask(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    has_formats = episode_of(rollout) == GATEWAY and rollout.engine == "vllm"
    if not truncates(rollout) and not has_formats:  # a format of replies leaves a set, too
        raise ConfigError(
            f"{_KEEP_MASK} has no effect on sampling from all tokens; set rollout.top_p below 1, rollout.top_k or "
            "rollout.min_p above 0, or rollout.keep_sampling_mask=false"
        )
    if algorithm.advantage == "optimal_token_baseline":
        raise ConfigError(
            "algorithm.advantage=optimal_token_baseline measures gradients over the whole vocabulary, and "
            f"{_KEEP_MASK} trains on the sampled sets; set another algorithm.advantage, or "
            "rollout.keep_sampling_mask=false"
        )


def check_overlap_schedule(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError if rollout.overlap_schedule is set for an engine that does not have it."""
    if rollout.overlap_schedule and rollout.engine != "sglang" and not is_supervised(algorithm):
        raise ConfigError(
            f"rollout.overlap_schedule=true is a schedule of SGLang, but rollout.engine={rollout.engine}; set "
            "rollout.overlap_schedule=false, or rollout.engine=sglang"
        )


def check_drafts(rollout: RolloutConfig, actor: ActorConfig) -> None:
    """Raise ConfigError for an engine that cannot verify drafts exactly, for draft layers that are not trained, and for
    keys that contradict each other or have no effect."""
    if rollout.draft == NO_DRAFTS:
        reject_unless_default("rollout", rollout, "set rollout.draft", ("draft_tokens", "draft_below"))
        return
    if rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.draft={rollout.draft} needs rollout.engine=vllm: {rollout.engine} verifies drafts with a sampler "
            f"whose responses depend on them; set rollout.draft={NO_DRAFTS}, or rollout.engine=vllm"
        )
    if rollout.draft == MTP and not actor.mtp_loss_coefficient:
        raise ConfigError(
            f"rollout.draft={MTP} needs actor.mtp_loss_coefficient above 0: without a loss the trainer drops the "
            "multi-token-prediction layers, and layers that are not trained predict the policy worse with each step; "
            f"set that key, or rollout.draft={NGRAM}"
        )
    budget, tokens = rollout.max_batched_tokens, rollout.draft_tokens + 1
    drafting = min(rollout.draft_below - 1, rollout.max_concurrent_requests)
    # One more request must find room, or the pass would never have so many that drafts end.
    needed = drafting * tokens + (rollout.max_concurrent_requests > drafting)
    if budget is not None and budget < needed:
        raise ConfigError(
            f"rollout.max_batched_tokens={budget} must be at least {needed}: up to rollout.draft_below - 1 requests "
            f"take rollout.draft_tokens + 1 = {tokens} tokens of a pass each, and requests that find no room wait"
        )


def check_draft_layers(rollout: RolloutConfig, num_layers: object) -> None:
    """Raise ConfigError for a number of draft tokens that vLLM rejects for this number of multi-token-prediction
    layers. The model's family rejects other values than whole numbers."""
    tokens = rollout.draft_tokens
    if rollout.draft != MTP or not isinstance(num_layers, int) or num_layers < 1:
        return
    if tokens > num_layers and tokens % num_layers:
        raise ConfigError(
            f"rollout.draft_tokens={tokens} must be a multiple of the model's {num_layers} multi-token-prediction "
            f"layers with rollout.draft={MTP}, or at most {num_layers}"
        )


def check_startup_plan(config: Config) -> None:
    """Raise ConfigError if vLLM would reuse the size of its KV cache from an earlier start on GPUs that it shares.

    vLLM compares the free memory only. Trainer ranks, whose memory is not allocated yet, may need more than then.
    """
    judge = None if config.judge.hf_path is None else config.judge.engine
    engines = (config.rollout.engine, judge, "vllm" if is_on_engines(config.teacher) else None)
    vllm_starts = not is_supervised(config.algorithm) and "vllm" in engines
    if os.environ.get(STARTUP_PLAN, "0") in ("", "0") or not vllm_starts:
        return
    if config.cluster.placement == "colocated" and config.cluster.uses_cuda:
        raise ConfigError(
            f"{STARTUP_PLAN}={os.environ[STARTUP_PLAN]} makes vLLM reuse an earlier start's size of the KV cache, "
            "but with cluster.placement=colocated it depends on what the trainer ranks leave free; unset that variable"
        )


def check_staleness(config: Config) -> None:
    """Raise ConfigError naming contradictory keys, or a feature that does not support asynchronous training."""
    rollout = config.rollout
    if is_supervised(config.algorithm):
        return
    if rollout.max_staleness == 0:
        remedy = "set rollout.max_staleness above 0"
        reject_unless_default("rollout", rollout, remedy, ASYNCHRONOUS_KEYS)
        reject_unless_default("checkpoint", config.checkpoint, remedy, ("drain",))
        return
    asked = f"rollout.max_staleness={rollout.max_staleness}"
    if rollout.hard_staleness < rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness_hard={rollout.max_staleness_hard} is below {asked}, the average staleness; raise "
            "it, or lower rollout.max_staleness"
        )
    _check_paused(rollout, drain=config.checkpoint.drain)
    if config.cluster.placement == "colocated":
        raise ConfigError(
            f"{asked} generates while the trainer updates, but colocated engines share devices with the trainer ranks; "
            "set cluster.placement=disaggregated, or rollout.max_staleness=0"
        )
    # Admission needs free slots for a whole group (admission.may_submit); a larger group could never start.
    slots = concurrent_episodes(rollout)
    if rollout.samples_per_prompt > slots:
        raise ConfigError(
            f"rollout.samples_per_prompt={rollout.samples_per_prompt} exceeds the {slots} concurrent requests of an "
            f"engine, and with {asked} all responses of a group start together; raise rollout.max_concurrent_requests"
        )
    if config.algorithm.advantage == "remax":
        raise ConfigError(
            f"{asked}: algorithm.advantage=remax needs a greedy baseline from the weights that sampled the group, but "
            "these have changed; choose another estimator, or set rollout.max_staleness=0"
        )
    if config.actor.moe.router_replay == "engine" and rollout.swap != FINISH:
        raise ConfigError(
            f"{asked} with rollout.swap={rollout.swap} changes weights during responses, but "
            "actor.moe.router_replay=engine replays the experts of one version; set rollout.swap=finish, or "
            "actor.moe.router_replay=none"
        )


def _check_paused(rollout: RolloutConfig, *, drain: bool) -> None:
    """Check keys with which responses wait for later weights: partial_tokens and replay_schedule."""
    if rollout.partial_tokens is not None and rollout.swap == FINISH:
        raise ConfigError(
            f"rollout.partial_tokens={rollout.partial_tokens} pauses responses until the next weight version, but with "
            "rollout.swap=finish the next version waits for all responses; set rollout.swap=keep or recompute, or "
            "leave rollout.partial_tokens at null"
        )
    if rollout.replay_schedule is not None and (rollout.swap != RECOMPUTE or has_turns(rollout)):
        raise ConfigError(
            f"rollout.replay_schedule={rollout.replay_schedule} supports single-turn episodes with "
            f"rollout.swap=recompute, but rollout.swap is {rollout.swap} and rollout.episode is {rollout.episode}; set "
            "rollout.swap=recompute and single turns, or leave rollout.replay_schedule at null"
        )
    if rollout.replay_schedule is not None and drain:
        raise ConfigError(
            "checkpoint.drain=true waits until running responses have finished, but with "
            f"rollout.replay_schedule={rollout.replay_schedule} they wait for later weights; set checkpoint.drain=false"
        )
