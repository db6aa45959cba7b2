"""Keys of the teacher: contradictions are rejected by name."""

from __future__ import annotations

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.validation import validate_keys
from mcore_rl.errors import ConfigError

ON = ["teacher.hf_path=/teacher", "teacher.in_advantage=1"]
NONE = "reward.function=none"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.in_loss=0.1"], r"^teacher\.in_loss=0\.1 has no effect; set teacher\.hf_path, or leave"),
        (["teacher.alone=true"], r"^teacher\.alone=True has no effect; set teacher\.hf_path"),
        (ON[:1], r"^teacher\.hf_path=/teacher has no effect with .*set teacher\.in_advantage=1 .*teacher\.in_loss=1"),
        ([*ON, "teacher.in_advantage=-1"], r"^teacher\.in_advantage=-1\.0 must be 0 or more"),
        ([*ON, "teacher.top_k=8"], r"^teacher\.top_k=8 has no effect; set teacher\.in_loss above 0"),
        (
            [*ON, "teacher.in_loss=1", "teacher.rest=renormalize"],
            r"^teacher\.rest=renormalize .*teacher\.top_k above 0",
        ),
        ([*ON, "teacher.in_loss=1", "teacher.top_k=8", "teacher.rest=drop"], r"^teacher\.rest=drop must be one of"),
        (
            [*ON, "algorithm.policy_loss.name=sft"],
            r"^teacher\.hf_path=/teacher: .*name=sft samples none; set it to null",
        ),
        (
            [*ON, NONE],
            r"^reward\.function=none leaves responses without a reward.*or teacher\.alone=true to learn from",
        ),
        (
            [*ON, NONE, "teacher.alone=true", "algorithm.dynamic_sampling.enable=true"],
            r"^algorithm\.dynamic_sampling\.enable=true drops groups of equal rewards.*set it to false",
        ),
        *(
            ([*ON, "teacher.alone=true", changed], rf"^{named} has no effect with teacher\.alone=true, which drops")
            for changed, named in (
                ("algorithm.length_penalty=0.1", r"algorithm\.length_penalty=0\.1"),
                ("algorithm.kl.in_reward=0.1", r"algorithm\.kl\.in_reward=0\.1"),
                ("algorithm.advantage=optimal_token_baseline", r"algorithm\.advantage=optimal_token_baseline"),
                ("algorithm.per_source=[{source: a, leave_one_out: true}]", r"algorithm\.per_source, a: advantage"),
                ("algorithm.baseline=source", r"algorithm\.baseline=source"),
            )
        ),
    ],
)
def test_teacher_keys_that_contradict_are_rejected(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_keys(load_config(base, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["teacher.alone=true", NONE, "algorithm.per_source=[{source: a, weight: 2}]"],
        ["teacher.in_advantage=0", "teacher.in_loss=1"],
        ["teacher.in_loss=1"],
    ],
)
def test_teacher_valid_keys_pass(base: str, overrides: list[str]) -> None:
    validate_keys(load_config(base, [*ON, *overrides]))


def test_teacher_role_leaves_out_what_belongs_to_training(base: str) -> None:
    """A part that the teacher's checkpoint lacks must not be built, and its weights must not be rounded."""
    training = ["actor.mtp_loss_coefficient=0.1", "actor.moe.z_loss_coefficient=0.1", "actor.parallel.tp=2"]
    config = load_config(base, [*ON, *training, "model.random_init=true", "actor.moe.dispatcher=allgather"])
    role = ModelRole.teacher(config.teacher, config.actor, config.model)
    assert (role.checkpoint, role.model.hf_path, role.model.random_init) == ("teacher.hf_path", "/teacher", False)
    section = role.section
    assert (section.mtp_loss_coefficient, section.moe.z_loss_coefficient, section.lora.rank) == (0, 0, 0)
    assert (section.parallel.tp, section.moe.dispatcher) == (2, "allgather")
