"""Keys of the teacher: contradictions are rejected by name."""

from __future__ import annotations

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.teacher import server_key
from mcore_rl.config.rules.validation import validate_keys
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.teacher import teacher_sequences
from model_converters.hf.side_files import HF_FOLDER

ON = ["teacher.hf_path=/teacher", "teacher.in_advantage=1"]
NONE = "reward.function=none"
AVERAGE = ["teacher.moving_average=0.9", "teacher.in_advantage=1"]
SERVED = ["teacher.url=http://a/v1", "teacher.in_advantage=1", "rollout.temperature=1"]
ENGINES = [*ON, "teacher.num_engines=1", "rollout.temperature=1"]
RANKS = [*ON, "teacher.num_ranks=2"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["teacher.in_loss=0.1"],
            r"^teacher\.in_loss=0\.1 has no effect; set .*teacher\.url or teacher\.moving_average, or leave",
        ),
        (["teacher.alone=true"], r"^teacher\.alone=True has no effect; set teacher\.hf_path"),
        (ON[:1], r"^teacher\.hf_path=/teacher has no effect with .*set teacher\.in_advantage=1 .*teacher\.in_loss=1"),
        ([*SERVED, *ON], r"^teacher\.hf_path=/teacher has no effect with teacher\.url=http://a/v1; set one of the two"),
        (
            [*ON, "teacher.checkpoint=/step_1"],
            r"^teacher\.hf_path=/teacher has no effect with teacher\.checkpoint=/step_1; set one of the two",
        ),
        (
            ["teacher.checkpoint=/step_1", "teacher.in_advantage=1", "teacher.num_engines=1", "rollout.temperature=1"],
            r"^teacher\.num_engines=1: engines read .*convert teacher\.checkpoint=/step_1 with",
        ),
        (["teacher.url=host:80", "teacher.in_advantage=1"], r"^teacher\.url=host:80 is not the address of a server"),
        ([*SERVED, "teacher.num_engines=1"], r"^teacher\.num_engines=1 has no effect with teacher\.url=http://a/v1"),
        ([*SERVED, "teacher.tp=2"], r"^teacher\.tp=2 has no effect; set teacher\.num_engines above 0"),
        (
            [*SERVED, "teacher.offload=false"],
            r"^teacher\.offload=False has no effect; set teacher\.num_engines=0 and teacher\.hf_path",
        ),
        (
            [*SERVED, "teacher.in_loss=1"],
            r"^teacher\.in_loss=1 over the whole vocabulary needs .* which a server cannot return; set",
        ),
        (
            [*SERVED, "teacher.in_loss=1", "teacher.top_k=4", "teacher.api=completions"],
            r"^teacher\.top_k=4: teacher\.api=completions returns no ids",
        ),
        ([*SERVED, "rollout.temperature=0.7"], r"^rollout\.temperature=0\.7: .* from a server have temperature 1"),
        (
            [*ENGINES, "rollout.temperature=0.7"],
            r"^rollout\.temperature=0\.7: .* from engines \(teacher\.num_engines=1\)",
        ),
        (
            [*ENGINES, "teacher.in_loss=1"],
            r"^teacher\.in_loss=1 over .* which engines \(teacher\.num_engines=1\) cannot",
        ),
        (
            [*ENGINES, "teacher.api=sglang"],
            r"^teacher\.api=sglang has no effect; set teacher\.url instead of teacher\.hf",
        ),
        (
            [*ON, "teacher.max_concurrent_requests=2"],
            r"^teacher\.max_concurrent_requests=2 has no effect; set teacher\.num_engines above 0, or teacher\.url",
        ),
        ([*ON, "teacher.served_model=m"], r"^teacher\.served_model=m has no effect without teacher\.url; remove"),
        (
            [*SERVED[1:], "teacher.served_model=m", "teacher.by_source=[{source: a, url: 'http://b/v1'}]"],
            r"^teacher\.served_model=m has no effect without teacher\.url; remove it, or set served_model of entries",
        ),
        (
            [*ON, "teacher.by_source=[{source: a, hf_path: /b, served_model: m}]"],
            r"^teacher\.by_source, a: served_model=m has no effect without a url",
        ),
        *(
            ([f"teacher.url='{url}'", *SERVED[1:]], rf"^teacher\.url{message}")
            for url, message in (
                ("http://[abc", r" is not the address of a server \(host or port are malformed\); write it as http:"),
                (
                    "http://a:xx/v1",
                    r" is not the address of a server \(host or port are malformed\); write it as http:",
                ),
                ("http://a b/v1", r"=http://a b/v1 is not the address of a server; write it as http:"),
                ("http://user:secret@a/v1", r" has a user or a password, .*set teacher\.api_key_variable"),
                ("http://user:secret@a:xx/v1", r" is not the address of a server \(host or port are malformed\)"),
            )
        ),
        (
            [*ON, "teacher.by_source=[{source: a}]"],
            r"^teacher\.by_source, a: hf_path, checkpoint, url or moving_average must be set",
        ),
        (
            [*ON, "teacher.by_source=[{source: a, hf_path: /b}, {source: a, hf_path: /c}]"],
            r"^teacher\.by_source names a twice; remove one of the entries",
        ),
        (
            [*ON, "teacher.by_source=[{source: '', hf_path: /b}]"],
            r"^teacher\.by_source has an entry with an empty source; name a data_source, or set",
        ),
        (
            [*ON, "teacher.by_source=[{source: a, url: 'http://b'}]"],
            r"^teacher: some teachers have a url and others do not; set url for all",
        ),
        (
            [*ON, "teacher.moving_average=0.9"],
            r"^teacher\.hf_path=/teacher has no effect with teacher\.moving_average=0\.9; set one of the two",
        ),
        (
            [*AVERAGE, "teacher.num_engines=1", "rollout.temperature=1"],
            r"^teacher\.num_engines=1: the average of teacher\.moving_average=0\.9 is on the actor's ranks; set .*=0",
        ),
        *(
            ([*ON, f"teacher.{key}={value}"], rf"^teacher\.{key}={value} has no effect; set teacher\.num_ranks above 0")
            for key, value in (
                ("parallel.tp", 2),
                ("tokens_per_microbatch", 9),
                ("moe.dispatcher", "allgather"),
                ("strategy", "fsdp2"),
                ("fp8", "blockwise"),
            )
        ),
        ([*ON, "teacher.dtype=float32"], r"^teacher\.dtype=float32 has no effect; set .*num_engines .*num_ranks"),
        (
            [*RANKS, "teacher.num_engines=1"],
            r"^teacher\.num_ranks=2 has no effect with teacher\.num_engines=1: .*set one of the two to 0",
        ),
        (
            [*SERVED, "teacher.num_ranks=2"],
            r"^teacher\.num_ranks=2 has no effect with teacher\.url=http://a/v1, .*set it to 0",
        ),
        (
            [*AVERAGE, "teacher.num_ranks=2"],
            r"^teacher\.num_ranks=2: the average of teacher\.moving_average=0\.9 is on the actor's ranks.*num_ranks=0",
        ),
        (
            [*RANKS, "teacher.in_loss=1"],
            r"^teacher\.in_loss=1 over the whole vocabulary .* which ranks of its own \(teacher\.num_ranks=2\) do not",
        ),
        ([*RANKS, "teacher.tp=2"], r"^teacher\.tp=2 has no effect; set teacher\.num_engines above 0"),
        ([*RANKS, "teacher.max_concurrent_requests=2"], r"^teacher\.max_concurrent_requests=2 has no effect; set"),
        (
            [*RANKS, "teacher.parallel.tp=3"],
            r"^teacher\.parallel\.tp=3 .* divide the 2 ranks of the teacher \(teacher\.",
        ),
        (
            [*RANKS, "actor.num_ranks=1"],
            r"^teacher\.num_ranks=2 ranks share the slots of the 1 trainer ranks; lower it",
        ),
        (
            [*ON, "teacher.num_ranks=99"],
            r"^teacher\.num_ranks=99, but cluster\.nodes x cluster\.gpus_per_node offers \d+; lower it",
        ),
        ([*RANKS, "teacher.tokens_per_microbatch=9"], r"^teacher\.tokens_per_microbatch=9 must be at least rollout\."),
        (
            [*RANKS, "data.hint_key=answer", "data.max_hinted_tokens=1000000"],
            r"^teacher\.tokens_per_microbatch=4096 is below the 1\d+ tokens of a prompt with its hint",
        ),
        ([AVERAGE[1], "teacher.moving_average=1.5"], r"^teacher\.moving_average=1\.5 must be at most 1"),
        (
            ["data.hint_key=answer"],
            r"^data\.hint_key=answer has no effect; set teacher\.moving_average, or teacher\.hf",
        ),
        ([*AVERAGE, "data.max_hinted_tokens=9"], r"^data\.max_hinted_tokens=9 has no effect; set data\.hint_key"),
        (
            [*AVERAGE, "data.hint_key=answer", "data.hint_template='{prompt}'"],
            r"^data\.hint_template has no \{hint\}; put it where the hint of a row goes",
        ),
        (
            [*AVERAGE, "data.hint_key=answer", "data.hint_template='{prompt} {hint} {prompt}'"],
            r"^data\.hint_template has 2 times \{prompt\}, .*; leave one",
        ),
        (
            [*AVERAGE, "data.hint_key=answer", "data.long_prompts=truncate_left"],
            r"^data\.long_prompts=truncate_left would shorten .*set it to drop",
        ),
        (
            [*AVERAGE, "data.hint_key=answer", "data.max_hinted_tokens=1000000"],
            r"^actor\.tokens_per_microbatch=\d+ is below the 1\d+ tokens of a prompt with its hint .*; raise it, or",
        ),
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
    with pytest.raises(ConfigError, match=message) as raised:
        validate_keys(load_config(base, overrides))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["teacher.alone=true", NONE, "algorithm.per_source=[{source: a, weight: 2}]"],
        ["teacher.in_advantage=0", "teacher.in_loss=1"],
        ["teacher.in_loss=1"],
        ["teacher.by_source=[{source: a, hf_path: /b}]", "teacher.hf_path=null"],
        [*ENGINES, "teacher.in_loss=1", "teacher.top_k=4", "teacher.tp=2", "teacher.max_concurrent_requests=2"],
        [*SERVED, "teacher.hf_path=null", "teacher.in_loss=1", "teacher.top_k=4", "teacher.api=sglang"],
        [*RANKS, "teacher.in_loss=1", "teacher.top_k=4", "teacher.parallel.tp=2", "teacher.dtype=float32"],
        [*RANKS, "teacher.hf_path=null", "teacher.checkpoint=/step_1", "rollout.temperature=0.7"],
        # Two responses per update: enough for the actor, and 2 of 4 data-parallel ranks of the teacher have no samples.
        [
            *("teacher.num_ranks=4", "actor.parallel.tp=4", "trainer.prompts_per_step=4"),
            *("trainer.prompts_per_update=1", "rollout.samples_per_prompt=2"),
        ],
        ["teacher.hf_path=null", "teacher.moving_average=0", "teacher.in_loss=1", "data.hint_key=extra_info.solution"],
        ["teacher.by_source=[{source: a, moving_average: 1}]", "data.hint_key=answer", "data.max_hinted_tokens=600"],
    ],
)
def test_teacher_valid_keys_pass(base: str, overrides: list[str]) -> None:
    validate_keys(load_config(base, [*ON, *overrides]))


def test_teacher_entries_begin_with_the_one_for_other_rows(base: str) -> None:
    overrides = ["teacher.by_source=[{source: a, hf_path: /b}]"]
    config = load_config(base, [*ON, *overrides])
    assert [entry.given for entry in config.teacher.entries] == [
        "teacher.hf_path=/teacher",
        "teacher.by_source, a: hf_path=/b",
    ]
    config = load_config(base, overrides)
    assert [entry.source for entry in config.teacher.entries] == ["a"]


def test_teacher_checkpoint_names_the_folder_of_its_files(base: str) -> None:
    config = load_config(base, ["teacher.checkpoint=/step_1", "teacher.in_advantage=1"])
    validate_keys(config)
    (entry,) = config.teacher.entries
    assert (entry.given, entry.directory) == ("teacher.checkpoint=/step_1", f"/step_1/{HF_FOLDER}")


def test_teacher_engines_have_room_for_the_token_that_vllm_samples(base: str) -> None:
    config = load_config(base, [*ENGINES, "teacher.tp=2", "teacher.dtype=bfloat16", "rollout.engine=sglang"])
    role = EngineRole.teacher(config.teacher, config.teacher.entries[0], config.rollout, config.model)
    section, rollout = role.section, config.rollout
    assert section.max_prompt_tokens + section.max_response_tokens == (
        rollout.max_prompt_tokens + rollout.max_response_tokens + 1
    )
    assert (section.engine, section.tp, section.num_engines, section.max_batched_tokens) == ("vllm", 2, 1, 2048)
    assert (role.model.hf_path, role.model.dtype, role.key("tp")) == ("/teacher", "bfloat16", "teacher.tp")


def test_server_key_comes_from_the_environment(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(base, [*SERVED, "teacher.api_key_variable=TEACHER_KEY"])
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^teacher\.api_key_variable=TEACHER_KEY: there is no such environment"):
        server_key(config.teacher)
    monkeypatch.setenv("TEACHER_KEY", "secret")
    assert server_key(config.teacher) == "secret"
    monkeypatch.setenv("TEACHER_KEY", "secret\n")
    with pytest.raises(
        ConfigError, match=r"^teacher\.api_key_variable=TEACHER_KEY: the key has a line break"
    ) as raised:
        server_key(config.teacher)
    assert "secret" not in str(raised.value)


def test_teacher_role_leaves_out_what_belongs_to_training(base: str) -> None:
    """A part that the teacher's checkpoint lacks must not be built, and its weights must not be rounded."""
    training = ["actor.mtp_loss_coefficient=0.1", "actor.moe.z_loss_coefficient=0.1", "actor.parallel.tp=2"]
    config = load_config(base, [*ON, *training, "model.random_init=true", "actor.moe.dispatcher=allgather"])
    role = ModelRole.teacher(config.teacher.entries[0], config.actor, config.model)
    assert (role.checkpoint, role.model.hf_path, role.model.random_init) == ("teacher.hf_path", "/teacher", False)
    section = role.section
    assert (section.mtp_loss_coefficient, section.moe.z_loss_coefficient, section.lora.rank) == (0, 0, 0)
    assert (section.parallel.tp, section.moe.dispatcher) == (2, "allgather")


def test_configurations_of_earlier_runs_are_accepted(base: str) -> None:
    """teacher.in_advantage was 1 by default, so their config.yaml has it also without a teacher."""
    validate_keys(load_config(base, ["teacher.in_advantage=1"]))
    with pytest.raises(ConfigError, match=r"teacher\.in_advantage=0\.5 has no effect"):
        validate_keys(load_config(base, ["teacher.in_advantage=0.5"]))


def test_teacher_engines_have_room_for_prompts_with_hints(base: str) -> None:
    config = load_config(base, ["data.hint_key=answer", "data.max_hinted_tokens=4000"])
    assert teacher_sequences(config).max_prompt_tokens == 4000
    config.data.max_hinted_tokens = 1
    # A row without a hint has the policy's prompt.
    assert teacher_sequences(config).max_prompt_tokens == config.rollout.max_prompt_tokens


def test_moving_average_reads_the_files_of_the_policy(base: str) -> None:
    config = load_config(base, [*AVERAGE, "model.random_init=true"])
    (entry,) = config.teacher.entries
    role = ModelRole.teacher(entry, config.actor, config.model)
    assert (role.checkpoint, role.model.hf_path, role.model.random_init) == (
        "teacher.moving_average",
        config.model.hf_path,
        False,
    )
    assert entry.given == "teacher.moving_average=0.9"
