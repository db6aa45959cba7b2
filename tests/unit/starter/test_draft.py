"""Values of a first configuration for models and machines."""

from __future__ import annotations

import pytest

from mcore_rl.config.rules.validation import validate_keys
from mcore_rl.doctor.machine import Machine
from mcore_rl.starter.answers import ALGORITHMS, Answers
from mcore_rl.starter.draft import ON_CPU, ON_GPUS, Scale, as_text, drafted, fitted, loaded

GPUS, CPU = Machine(8, "NVIDIA H100", 79, 64, 1800), Machine(0, cores=2, host_memory_gib=16)


def answers(algorithm: str = "grpo", positions: int | None = 32768, val: str = "val.jsonl") -> Answers:
    return Answers("model", "train.jsonl", val, algorithm, "math", positions)


@pytest.mark.parametrize("machine", [GPUS, CPU], ids=["gpus", "cpu"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("positions", [None, 300, 1100, 131072])
def test_drafted_configuration_is_valid(machine: Machine, algorithm: str, positions: int | None) -> None:
    config = loaded(drafted(answers(algorithm, positions), machine))
    validate_keys(config, run_here=False)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert longest <= (positions or longest)
    assert (config.cluster.device, config.cluster.gpus_per_node) == (("cuda", 8) if machine is GPUS else ("cpu", 1))


def test_drafted_algorithms_have_the_settings_of_their_papers() -> None:
    grpo, dapo, gspo = (loaded(drafted(answers(name), GPUS)).algorithm for name in ALGORITHMS)
    clips = [(each.policy_loss.clip_low, each.policy_loss.clip_high) for each in (grpo, dapo, gspo)]
    assert clips == [(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4)]
    assert [each.dynamic_sampling.enable for each in (grpo, dapo, gspo)] == [False, True, False]
    assert [each.policy_loss.name for each in (grpo, dapo, gspo)] == ["ppo_clip", "ppo_clip", "gspo"]


@pytest.mark.parametrize("scale", [ON_CPU, ON_GPUS])
@pytest.mark.parametrize("positions", [2, 512, 768, 4096])
def test_fitted_scale_uses_all_positions_that_it_needs(scale: Scale, positions: int) -> None:
    made = fitted(scale, positions)
    wanted = scale.prompt_tokens + scale.response_tokens
    assert made.prompt_tokens + made.response_tokens == min(positions, wanted)
    assert min(made.prompt_tokens, made.response_tokens) > 0


def test_each_line_of_the_text_has_an_explanation() -> None:
    lines = as_text(drafted(answers(), GPUS), "Title.\nSecond line.").splitlines()
    assert lines[:2] == ["# Title.", "# Second line."]
    values = [line for line in lines[2:] if not line.endswith(":")]
    assert len(values) > 15
    assert [line for line in values if "  # " not in line] == []


def test_drafted_without_validation_sets_no_key_of_it() -> None:
    draft = drafted(answers(val=""), CPU)
    assert {"data.val", "trainer.validate_every_steps"}.isdisjoint(draft)


def test_machine_description_counts_gpus() -> None:
    assert GPUS.describe() == "8 GPUs (NVIDIA H100) of 79 GiB, 64 cores, 1800 GiB of memory"
    assert Machine(1, gpu_memory_gib=24).describe() == "1 GPU of 24 GiB"
    assert CPU.describe() == "no GPU, 2 cores, 16 GiB of memory"
