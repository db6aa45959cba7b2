"""Translation of launch scripts and configurations in the style that verl and its recipes publish."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl.config.document import commented_yaml
from mcore_rl.migration.acceptance import rejection
from mcore_rl.migration.draft import Draft
from mcore_rl.migration.source import Source
from mcore_rl.migration.verl.reader import read_verl
from mcore_rl.migration.verl.translation import translate

SCRIPTS = Path(__file__).parent / "scripts"
PROGRAM = "python3 -m verl.trainer.main_ppo"
MTP = "actor_rollout_ref.model.mtp"
DRAFTS = f"{MTP}.enable=True {MTP}.enable_rollout=True"
TRAINED = f"{MTP}.enable_train=True actor_rollout_ref.actor.strategy=megatron"
REQUIRED = "actor_rollout_ref.model.path=/m data.train_files=/t.parquet trainer.total_training_steps=8"


def imported(name: str, rows: int | None = None, **given: str) -> tuple[Source, Draft, list[str]]:
    return translate(read_verl(SCRIPTS / name, given).settings, rows)


def translated(overrides: str, tmp_path: Path, program: str = PROGRAM) -> tuple[Source, Draft, list[str]]:
    script = tmp_path / "run.sh"
    script.write_text(f"{program} {REQUIRED} {overrides}\n")
    return translate(read_verl(script, {}).settings)


def values(name: str, *keys: str, rows: int | None = None, **given: str) -> dict[str, object]:
    source, draft, _ = imported(name, rows, **given)
    assert source.problems == []
    assert draft.blockers == []
    return {key: draft.values.get(key) for key in keys}


EXPECTED: dict[str, dict[str, object]] = {
    "dapo_32b.sh": {
        "run.dir": "runs/dapo-dense-32b",
        "model.hf_path": "${HOME}/work/models/dense-32b",
        "data.train": ["${HOME}/work/data/dapo-math-17k.parquet"],
        "data.long_prompts": "truncate_left",
        "rollout.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 20480,
        "rollout.samples_per_prompt": 16,
        "rollout.num_engines": 32,
        "rollout.validation_samples": 32,
        "reward.function": "by_data_source",
        "reward.overlong.buffer_tokens": 4096,
        "algorithm.policy_loss.clip_high": 0.28,
        "algorithm.policy_loss.dual_clip": 10.0,
        "algorithm.dynamic_sampling.max_batches": 30,  # 10 batches of 1,536 prompts, in batches of 512
        "trainer.prompts_per_step": 512,
        "trainer.prompts_per_update": 32,
        "actor.parallel.tp": 8,
        "actor.tokens_per_microbatch": 22528,  # 2,816 tokens per GPU on 8 ranks
        "actor.optimizer.warmup_steps": 160,  # 10 steps of 16 updates
        "actor.recompute": "full",
        "actor.parallel.shard_parameters": True,
        "actor.offload.grads": None,
        "cluster.nodes": 16,
    },
    "dapo_30b_megatron.sh": {
        "run.dir": "runs/moe_vllm_megatron",
        "data.val": ["/data/aime.parquet", "/data/math500.parquet"],
        "data.shuffle": None,  # only in a comment
        "algorithm.normalize_by_std": False,
        "algorithm.loss_aggregation": "seq-mean-token-sum-norm",
        "rollout.max_concurrent_requests": 1024,
        "actor.parallel.vpp": 2,
        "actor.parallel.etp": 4,  # Megatron's default is tp
        "actor.tokens_per_microbatch": 20480,
        "actor.optimizer.cpu_offload": True,
        "actor.offload.optimizer": None,
        "actor.optimizer.schedule": "cosine",
        "actor.optimizer.weight_decay": 0.01,
        "actor.moe.dispatcher": "deepep",
        "actor.moe.aux_loss_coefficient": 0.001,
    },
    "grpo_gsm8k.sh": {
        "run.dir": "runs/gsm8k_7b_first",
        "data.long_prompts": "drop",
        "algorithm.kl.in_loss": 0.001,
        "algorithm.kl.loss_kind": "low_var",
        "algorithm.policy_loss.dual_clip": 3.0,  # verl's default
        "rollout.num_engines": 4,
        "actor.tokens_per_microbatch": 40 * 1536,
        "trainer.validate_every_steps": 0,
        "checkpoint.every_steps": 20,
        "reference.offload": True,
    },
    "ppo_critic.sh": {
        "algorithm.advantage": "gae",  # verl's default
        "algorithm.lam": 0.95,
        "algorithm.kl.in_reward": 0.005,
        "algorithm.kl.controller": "adaptive",
        "algorithm.kl.target": 0.1,
        "algorithm.kl.horizon": 10000,
        "data.val": None,
        "critic.hf_path": "/models/critic",
        "critic.optimizer.lr": 2e-5,
        "critic.clip_range": 0.5,
        "critic.update_epochs": 2,
        "critic.parallel.tp": 4,
        "critic.tokens_per_microbatch": 8 * 1536,
        "trainer.critic_warmup_steps": 5,
    },
    "deepseek_671b.sh": {
        "model.hf_path": "/shared/models/DeepSeek-V3",
        "cluster.nodes": 32,
        "rollout.num_engines": 8,
        "actor.parallel.pp": 16,
        "actor.parallel.first_stage_layers": 4,
        "actor.parallel.last_stage_layers": 1,
        "actor.offload.grads": True,
        "actor.moe.router_replay": "engine",
        "trainer.steps": 300,
    },
    "fully_async.sh": {
        "cluster.placement": "disaggregated",
        "cluster.nodes": 16,
        "rollout.nodes": 12,
        "rollout.num_engines": 24,
        "rollout.max_staleness": 1,
        "rollout.swap": "recompute",
        "trainer.prompts_per_step": 512,
        "trainer.prompts_per_update": 128,
        "trainer.steps": 400,
        "actor.tokens_per_microbatch": 20480,
        "actor.optimizer.warmup_steps": 10,
        "algorithm.correction.kind": "truncate",
        "algorithm.correction.high": 2.5,
    },
    "one_step_off.sh": {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 8,
        "actor.num_ranks": 12,
        "rollout.num_engines": 2,
        "rollout.max_staleness": 1,
        "rollout.max_staleness_hard": 1,
        "rollout.swap": "finish",
        "algorithm.advantage": "rloo",
    },
    "tools.sh": {
        "data.train": ["/data/train.parquet"],
        "data.template_kwargs": {"enable_thinking": False},
        "rollout.max_response_tokens": 1024,
        "rollout.gpu_memory_fraction": 0.5,  # the script deletes the key
        "rollout.tools": "${PWD}/tools.yaml",
        "rollout.max_turns": 5,
        "rollout.max_tool_calls_per_turn": 1,
        "rollout.tool_answer_characters": 256,
        "rollout.tool_answer_keep": "both",
        "reward.function": "my_reward.py:score",
        "reward.kwargs": {"bonus": "0.5"},
        "trainer.validate_every_steps": 20,
    },
    "gspo_sbatch.sh": {
        "model.hf_path": "/models/moe",
        "algorithm.policy_loss.name": "gspo",
        "algorithm.policy_loss.clip_low": 3e-4,
        "algorithm.policy_loss.dual_clip": None,
        "trainer.prompts_per_step": 64,
        "rollout.tp": 2,
    },
    "trainer.yaml": {
        "run.dir": "runs/p-1",
        "data.train": ["/data/a.parquet", "/data/b.parquet"],
        "algorithm.advantage": "remax",
        "actor.optimizer.beta2": 0.95,
        "actor.tokens_per_microbatch": 8192,
        "checkpoint.keep_last": 3,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_import_script_sets_expected_keys(name: str) -> None:
    assert values(name, *EXPECTED[name]) == EXPECTED[name]


def test_import_sft_script_with_arguments_is_supervised() -> None:
    keys = {
        "algorithm.policy_loss.name": "sft",
        "data.prompt_key": "question",
        "data.answer_key": "answer",
        "rollout.max_prompt_tokens": 1024,
        "actor.tokens_per_microbatch": 4 * 2048,
        "data.val": None,
        "actor.lora.rank": 32,
        "actor.lora.alpha": 16,
        "actor.parallel.tp": 2,
        "actor.optimizer.warmup_steps": 4,
        "actor.optimizer.schedule": "cosine",
        "cluster.gpus_per_node": 8,
    }
    source, draft, _ = translate(read_verl(SCRIPTS / "sft.sh", {"1": "8", "2": "out"}).settings)
    assert source.problems == []
    assert {key: draft.values.get(key) for key in keys} == keys


def test_import_sft_budget_counts_the_ranks_of_a_sequence(tmp_path: Path) -> None:
    overrides = "engine=megatron engine.context_parallel_size=2 model.path=/m data.train_files=/t"
    script = tmp_path / "run.sh"
    script.write_text(
        f"torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer {overrides} data.max_token_len_per_gpu=3000\n"
    )
    _, draft, _ = translate(read_verl(script, {}).settings)
    assert draft.values["actor.tokens_per_microbatch"] == 6000
    assert rejection(commented_yaml(draft.values, draft.origins, "title")) is None


def test_import_skypilot_yaml_reads_its_script() -> None:
    names = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "0"}
    found = values("skypilot.yaml", "cluster.nodes", "rollout.num_engines", "trainer.steps", **names)
    assert found == {"cluster.nodes": 2, "rollout.num_engines": 16, "trainer.steps": 5}


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "dapo_30b_megatron.sh"])
def test_import_result_passes_the_rules_of_plan(name: str) -> None:
    _, draft, _ = imported(name)
    assert rejection(commented_yaml(draft.values, draft.origins, "title")) is None


def test_import_layout_too_large_is_rejected_by_its_key() -> None:
    _, draft, _ = imported("dapo_30b_megatron.sh")
    message = rejection(commented_yaml(draft.values, draft.origins, "title"))
    assert message is not None
    assert message.startswith(
        "actor.parallel.ep=2 x actor.parallel.etp=4 x actor.parallel.pp=2 = 16 does not divide the 8"
    )
    _, draft, _ = imported("dapo_30b_megatron.sh", NNODES="2")
    assert rejection(commented_yaml(draft.values, draft.origins, "title")) is None


def test_import_epochs_with_rows_become_steps() -> None:
    assert values("grpo_gsm8k.sh", "trainer.steps", rows=7473) == {"trainer.steps": 15 * 7}
    _, draft, _ = imported("grpo_gsm8k.sh")
    assert "trainer.steps" not in draft.values
    assert any(line.startswith("trainer.steps: trainer.total_epochs=15") for line in draft.choices)


def test_import_lists_changes_of_units_and_denominators() -> None:
    _, draft, _ = imported("dapo_30b_megatron.sh")
    text = "\n".join(draft.changes)
    assert "trainer.prompts_per_update=128 count prompts" in text
    assert "an update has 128 x 8 responses" in text
    assert "ppo_micro_batch_size_per_gpu=2 responses per GPU: actor.tokens_per_microbatch=20480" in text
    assert "seq-mean-token-sum-norm divides by the padded length of the responses in verl" in text


def test_import_lists_defaults_that_differ() -> None:
    _, draft, _ = imported("grpo_gsm8k.sh")
    expected = (
        "actor.optimizer.weight_decay = 0.01, verl's default of actor_rollout_ref.actor.optim.weight_decay; ours is 0.1"
    )
    assert expected in draft.defaults
    assert draft.origins["actor.optimizer.weight_decay"].startswith("default of verl's")


def test_import_lists_every_key_without_counterpart() -> None:
    source, _, uncovered = imported("dapo_32b.sh")
    assert not any("not known to this importer" in line for line in uncovered)
    assert len(source.unread()) == 3


def test_import_yaml_with_defaults_lists_only_what_differs() -> None:
    _, _, uncovered = imported("trainer.yaml")
    assert uncovered == [
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size: the reference has the layout of the actor's ranks"
    ]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("algorithm.adv_estimator=gspo", "no counterpart of this value for algorithm.advantage"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
            "no counterpart of this value for algorithm.policy_loss",
        ),
        ("actor_rollout_ref.rollout.repetition_penalty=1.05", "set it to 1; validation may use rollout.validation_rep"),
        ("data.video_key=clips", "videos and audio are not supported"),
        ("distillation.enabled=True", "distillation is not translated; set teacher.* (docs/distillation.md)"),
        ("algorithm.rollout_correction.rollout_is_batch_normalize=true", "weights are not normalized here"),
        ("actor_rollout_ref.actor.optim.lr_decay_style=WSD", "the schedules are constant, cosine, linear"),
        ("actor_rollout_ref.actor.optim.optimizer=muon", "the optimizer is Adam"),
        ("reward_model.reward_manager=batch", "a batch is graded by a custom_reward_function"),
        ("trainer.v1.trainer_mode=separate_async", "set rollout.max_staleness"),
    ],
)
def test_import_setting_that_changes_training_is_a_blocker(override: str, reason: str, tmp_path: Path) -> None:
    _, draft, _ = translated(override, tmp_path)
    assert [line for line in draft.blockers if line.startswith(f"{override.replace('true', 'True')} (line 1): ")]
    assert reason in " ".join(draft.blockers)


def test_import_truncated_sampling_keeps_the_sampled_sets(tmp_path: Path) -> None:
    keys = "actor_rollout_ref.rollout"
    _, draft, _ = translated(f"{keys}.top_p=0.9 {keys}.top_k=50 +{keys}.min_p=0.1", tmp_path)
    assert draft.blockers == []
    names = ("top_p", "top_k", "min_p", "keep_sampling_mask")
    assert [draft.values[f"rollout.{name}"] for name in names] == [0.9, 50, 0.1, True]
    assert any("normalizes over the tokens that the engine sampled from" in line for line in draft.changes)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("reward_model.enable=True reward_model.model.path=/rm", "reward.function", "none"),
        ("reward_model.enable=True reward_model.model.path=/rm", "reward_model.hf_path", "/rm"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=1 actor_rollout_ref.rollout.val_kwargs.n=30",
         "rollout.validation_samples", 30),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=False actor_rollout_ref.rollout.val_kwargs.temperature=1",
         "rollout.validation_temperature", 0.0),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "rollout.validation_samples", None),
        ("+actor_rollout_ref.rollout.val_kwargs.min_p=0.1", "rollout.validation_min_p", 0.1),
        ("actor_rollout_ref.rollout.val_kwargs.repetition_penalty=1.2", "rollout.validation_repetition_penalty", 1.2),
        ("actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.1",
         "algorithm.kl.in_loss", None),
        ("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_3.0",
         "algorithm.correction.low", 0.5),
        ("algorithm.rollout_correction={rollout_rs:seq_mean_k1,rollout_rs_threshold:0.9_1.1}",
         "algorithm.correction.level", "geometric"),
        ("algorithm.filter_groups.enable=True", "algorithm.dynamic_sampling.max_batches", 1000),
        ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "algorithm.loss_aggregation", "token-sum"),
        ("actor_rollout_ref.model.lora.rank=8 'actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_fc2]'",
         "actor.lora.target_modules", ["q_proj", "k_proj", "v_proj", "down_proj"]),
        ("actor_rollout_ref.rollout.expert_parallel_size=4", "rollout.expert_parallel", True),
        ("+data.apply_chat_template_kwargs='{enable_thinking:false}'", "data.template_kwargs",
         {"enable_thinking": False}),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5 data.train_batch_size=512",
         "actor.optimizer.warmup_steps", 4 * 2),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=16 trainer.n_gpus_per_node=4",
         "actor.tokens_per_microbatch", 4 * 1024),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "algorithm.policy_loss.clip_low", 0.2),
        ("trainer.test_freq=False", "trainer.validate_every_steps", 0),
        ("data.max_prompt_length=8 data.max_prompt_length=16", "rollout.max_prompt_tokens", 16),
        (f"{DRAFTS} {TRAINED} {MTP}.num_speculative_tokens=3", "rollout.draft", "mtp"),
        (f"{DRAFTS} {TRAINED} {MTP}.num_speculative_tokens=3", "rollout.draft_tokens", 3),
        (f"{DRAFTS} {TRAINED}", "rollout.draft_tokens", 1),
        (f"{DRAFTS} {TRAINED}", "actor.mtp_loss_coefficient", 0.1),
        (f"{DRAFTS} {MTP}.method=ngram", "rollout.draft", "ngram"),
        (f"{DRAFTS}", "rollout.draft", None),
        (f"{DRAFTS} {MTP}.enable=False", "rollout.draft_tokens", None),
    ],
)  # fmt: skip
def test_import_value_becomes(override: str, key: str, value: object, tmp_path: Path) -> None:
    _, draft, _ = translated(f"algorithm.adv_estimator=grpo {override}", tmp_path)
    assert draft.values.get(key) == value


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("", "needs layers with a loss (actor.mtp_loss_coefficient)"),
        (f"{TRAINED} actor_rollout_ref.rollout.name=sglang", "rollout.draft needs rollout.engine=vllm"),
        (f"{MTP}.method=dflash", "rollout.draft has no method dflash"),
        (f"{TRAINED} actor_rollout_ref.rollout.quantization=fp8", "does not support rollout.quantization=fp8"),
    ],
)
def test_import_drafts_without_counterpart_are_a_change(override: str, reason: str, tmp_path: Path) -> None:
    _, draft, _ = translated(f"algorithm.adv_estimator=grpo {DRAFTS} {override}", tmp_path)
    assert "rollout.draft" not in draft.values
    (change,) = [each for each in draft.changes if "enable_rollout" in each]
    assert change.endswith(reason)


def test_import_unknown_number_names_the_variable(tmp_path: Path) -> None:
    source, _, _ = translated("trainer.nnodes=$NODES data.train_batch_size=$(wc -l x)", tmp_path)
    text = "; ".join(dict.fromkeys(source.problems))
    assert (
        "trainer.nnodes=${NODES} (line 1) is not a number: the script does not set NODES; add --set NODES=VALUE" in text
    )
    assert "data.train_batch_size=$(wc -l x) (line 1) is not a number: commands of the script are not run" in text


@pytest.mark.parametrize(
    "wrapper",
    [
        'ray job submit --runtime-env-json=\'{"a": "b=c"}\' -- python3 -m verl.trainer.main_ppo',
        "CUDA_VISIBLE_DEVICES=0,1 nohup python -u -m verl.trainer.main_ppo --config-name=ppo_trainer",
        "srun --nodes=1 env -u X A=b.c=d uv run --frozen python3 -m verl.trainer.main_ppo",
        "python3 verl/trainer/main_ppo.py",
        'docker run --rm image bash -lc "python3 -m verl.trainer.main_ppo data.shuffle=False" && python3 -m verl.x',
    ],
)
def test_import_wrapper_is_skipped(wrapper: str, tmp_path: Path) -> None:
    _, draft, uncovered = translated("data.train_batch_size=64", tmp_path, wrapper)
    assert draft.values["trainer.prompts_per_step"] == 64
    assert uncovered == []
