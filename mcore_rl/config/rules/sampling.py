"""Sampling rules: training must sample from the distribution that the trainer computes; validation is not
restricted."""

from __future__ import annotations

from mcore_rl.config.algorithm import COMPARING_ADVANTAGES, AlgorithmConfig, is_supervised
from mcore_rl.config.rules.changed_keys import written
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError

MIN_TEMPERATURE = 0.01
"""vLLM 0.32 raises lower temperatures to this one without an error (sampling_params.py)."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
"""MAX_STOPS and MAX_STOP_CHARACTERS bound the work per sampled token."""
_TRUNCATES = "samples from fewer tokens than the full softmax that the trainer computes"


def untrainable(*, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> tuple[str, str] | None:
    """Return the option that makes the sampled distribution differ from the trained one, with the reason and remedy;
    None if they are equal."""
    if top_p < 1:
        return "top_p", f"{_TRUNCATES}; set it to 1"
    if top_k != -1:
        return "top_k", f"{_TRUNCATES}; set it to -1"
    if temperature == 0:
        return "temperature", "is greedy sampling, which has no distribution to train; set it above 0"
    if temperature < MIN_TEMPERATURE:
        return "temperature", f"is below {MIN_TEMPERATURE:g}, to which the engine raises it; set it to at least that"
    return None


def stop_fault(stops: object) -> str | None:
    """Return the reason why `stops` is not a valid list of stop strings; None if it is valid."""
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
    if is_supervised(algorithm):
        return
    if rollout.temperature == 0 and algorithm.advantage in COMPARING_ADVANTAGES:
        raise ConfigError(
            f"rollout.temperature=0 makes all samples of a prompt equal, and algorithm.advantage="
            f"{algorithm.advantage} learns from their differences; set rollout.temperature above 0"
        )
    found = untrainable(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
    if found is not None:
        name, reason = found
        raise ConfigError(
            f"rollout.{name}={getattr(rollout, name):g} {reason}. Validation may use rollout.validation_{name}"
        )
