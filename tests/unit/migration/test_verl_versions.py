"""Keys of other versions and training backends of verl, programs of recipes, and complete YAML configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl.config.document import commented_yaml
from mcore_rl.migration.acceptance import rejection
from mcore_rl.migration.draft import Draft
from mcore_rl.migration.verl.reader import read_verl
from mcore_rl.migration.verl.translation import translate
from tests.unit.migration.test_verl import translated

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
TURNS, RS_THRESHOLD = f"{ROLLOUT}.multi_turn", f"{CORRECTION}.rollout_rs_threshold"
TORCHRUN = "torchrun --nproc_per_node=8 -m"


def values_of(overrides: str, tmp_path: Path) -> dict[str, object]:
    source, draft, uncovered = translated(f"algorithm.adv_estimator=grpo {overrides}", tmp_path)
    assert source.problems == []
    assert draft.blockers == []
    assert not any("not known" in line for line in uncovered)
    return draft.values


def yaml_draft(text: str, tmp_path: Path) -> Draft:
    path = tmp_path / "c.yaml"
    path.write_text(f"actor_rollout_ref: {{model: {{path: /m}}}}\n{text}")
    return translate(read_verl(path, {}).settings)[1]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (f"+{ACTOR}.loss_mode=clip_cov +{ACTOR}.clip_cov_ratio=0.01 +{ACTOR}.clip_cov_lb=2",
         {"algorithm.policy_loss.name": "clip_cov", "algorithm.policy_loss.cov_ratio": 0.01,
          "algorithm.policy_loss.cov_low": 2}),
        (f"{ACTOR}.megatron.router_replay.mode=R3 {ACTOR}.strategy=megatron", {"actor.moe.router_replay": "engine"}),
        (f"{ROLLOUT}.update_weights_bucket_megabytes=512", {"weights.bucket_mib": 512}),
        (f"{TURNS}.enable=True {TURNS}.tool_config_path=t.yaml {TURNS}.max_turns=5",
         {"rollout.max_turns": 5}),
        ("+reward.overlong_buffer.enable=True +reward.overlong_buffer.len=9 +reward.overlong_buffer.penalty_factor=1",
         {"reward.overlong.buffer_tokens": 9}),
        (f"{ACTOR}.tis_imp_ratio_cap=3", {"algorithm.correction.kind": "truncate", "algorithm.correction.high": 3}),
        (("algorithm.rollout_is=True algorithm.rollout_is_threshold=4 algorithm.rollout_is_mode=mask "
         "algorithm.rollout_is_level=geometric"),
         {"algorithm.correction.kind": "mask", "algorithm.correction.level": "geometric",
          "algorithm.correction.low": 0.25, "algorithm.correction.high": 4}),
        (f"{CORRECTION}.rollout_rs=sequence {CORRECTION}.rollout_rs_threshold=5",
         {"algorithm.correction.level": "sequence", "algorithm.correction.low": 0.2, "algorithm.correction.high": 5}),
        (f"{CORRECTION}.rollout_rs=seq_mean_k1 {RS_THRESHOLD}=0.99_1.01",
         {"algorithm.correction.kind": "reject", "algorithm.correction.level": "geometric",
          "algorithm.correction.low": 0.99, "algorithm.correction.high": 1.01}),
        (f"{CORRECTION}.rollout_rs=seq_max_k3 {RS_THRESHOLD}=0.01",
         {"algorithm.correction.kind": "reject", "algorithm.correction.level": "any_token",
          "algorithm.correction.measure": "k3", "algorithm.correction.high": 0.01}),
        (f"{CORRECTION}.rollout_rs=token_k1,seq_mean_k3 {RS_THRESHOLD}=3.0,0.02",
         {"algorithm.corrections": [{"kind": "reject", "level": "token", "high": 3.0},
                                    {"kind": "reject", "level": "geometric", "high": 0.02, "measure": "k3"}]}),
        ((f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_rs=seq_mean_k1 {RS_THRESHOLD}=0.99_1.01 "
          f"{CORRECTION}.rollout_token_veto_threshold=1e-4"),
         {"algorithm.corrections": [
             {"kind": "truncate", "level": "token", "low": 0.0, "high": 2.0},
             {"kind": "reject", "level": "geometric", "low": 0.99, "high": 1.01},
             {"kind": "reject", "level": "any_token", "low": 1e-4, "high": None},
         ]}),
        (f"{CORRECTION}.rollout_rs=token {RS_THRESHOLD}=5 {RS_THRESHOLD}_lower=0.5",
         {"algorithm.correction.low": 0.5}),
        ((f"{ACTOR}.strategy=veomni {ACTOR}.veomni.expert_parallel_size=8 {ACTOR}.veomni.ulysses_parallel_size=2 "
         f"{ACTOR}.veomni.param_offload=True"),
         {"actor.parallel.ep": 8, "actor.parallel.etp": 1, "actor.parallel.tp": 2, "actor.offload.params": True}),
        (f"{ACTOR}.strategy=fsdp2 {ACTOR}.fsdp_config.param_offload=True",
         {"actor.parallel.shard_parameters": True, "actor.offload.params": True, "actor.offload.grads": None,
          "actor.offload.optimizer": None}),
        (f"{ACTOR}.strategy=fsdp {ACTOR}.fsdp_config.fsdp_size=-1 trainer.nnodes=2",
         {"actor.parallel.shard_parameters": True, "actor.offload.params": None}),
        # Hybrid sharding, and another backend.
        (f"{ACTOR}.strategy=fsdp {ACTOR}.fsdp_config.fsdp_size=8 trainer.nnodes=2 trainer.n_gpus_per_node=8",
         {"actor.parallel.shard_parameters": None, "actor.offload.params": True, "actor.offload.grads": True}),
        (f"{ACTOR}.strategy=veomni", {"actor.parallel.shard_parameters": None, "actor.offload.grads": True}),
        (f"{ACTOR}.strategy=megatron", {"actor.offload.params": None}),
        ("trainer.device=cpu", {"actor.offload.params": None}),
        (f"{ACTOR}.strategy=torchtitan {ACTOR}.torchtitan.tensor_parallel_size=4", {"actor.parallel.tp": 4}),
        ((f"actor@{ACTOR}=mlite_actor {ACTOR}.engine.pp=4 {ACTOR}.engine.ep=2 {ACTOR}.engine.cp=2 {ACTOR}.engine.vpp=1 "
         f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=3000"),
         {"actor.parallel.pp": 4, "actor.parallel.ep": 2, "actor.parallel.vpp": None,
          "actor.tokens_per_microbatch": 6000}),
        ((f"{ACTOR}.strategy=megatron +{ACTOR}.megatron.override_transformer_config.fp8=hybrid "
         f"+{ACTOR}.megatron.override_transformer_config.fp8_recipe=blockwise"), {"actor.fp8": "blockwise"}),
        (f"{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.data_parallel_size=4 {ROLLOUT}.expert_parallel_size=8",
         {"rollout.tp": 8, "rollout.num_engines": 1, "rollout.expert_parallel": True}),
        (f"{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.data_parallel_size=4",
         {"rollout.tp": 2, "rollout.num_engines": 4, "rollout.expert_parallel": None}),
        ((f"{ROLLOUT}.name=sglang {ROLLOUT}.tensor_model_parallel_size=8 "
          f"+{ROLLOUT}.engine_kwargs.sglang.enable_dp_attention=True"),
         {"rollout.tp": 8, "rollout.expert_parallel": True, "rollout.data_parallel_attention": True}),
        (f"{ROLLOUT}.tensor_model_parallel_size=1 {ROLLOUT}.expert_parallel_size=1", {"rollout.expert_parallel": None}),
        ("trainer.logger=[console,wandb] trainer.project_name=p trainer.experiment_name=e",
         {"observe.trackers": ["wandb"], "observe.project": "p", "observe.run_name": "e"}),
        ('trainer.experiment_name="a_$(date +%H)_${X:?}"', {"run.dir": "runs/a"}),
        ("trainer.default_hdfs_dir=hdfs://h/run", {"checkpoint.copy_to": "hdfs://h/run"}),
        ("trainer.default_hdfs_dir=null", {"checkpoint.copy_to": None}),
        ("trainer.logger=[console] trainer.project_name=p", {"observe.trackers": None, "observe.project": None}),
    ],
)  # fmt: skip
def test_import_key_of_another_version_or_backend(overrides: str, expected: dict[str, object], tmp_path: Path) -> None:
    found = values_of(overrides, tmp_path)
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("fsdp_size=8", "shards over 8 GPUs and replicates the shards: no counterpart"),
        ("reshard_after_forward=False", "frees a layer's gathered weights after its forward pass"),
        ("offload_policy=True", "keeps shards in host memory during passes"),
    ],
)
def test_import_option_of_fsdp_with_another_meaning_is_listed(override: str, line: str, tmp_path: Path) -> None:
    start = f"trainer.nnodes=2 trainer.n_gpus_per_node=8 {ACTOR}.fsdp_config."
    assert [each for each in translated(start + override, tmp_path)[1].changes if override in each and line in each]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("algorithm.rollout_is_veto_threshold=1e-4", "add an entry of kind reject and level any_token"),
        (f"{CORRECTION}.loss_type=reinforce", "policy_loss.loss_mode=gpg"),
        (f"+{CORRECTION}.use_policy_gradient=True", "policy_loss.loss_mode=gpg"),
    ],
)
def test_import_correction_option_without_counterpart_blocks(override: str, reason: str, tmp_path: Path) -> None:
    assert reason in " ".join(translated(override, tmp_path)[1].blockers)


@pytest.mark.parametrize(
    "program", ["recipe.prime.main_prime", "verl.experimental.vla.main_ppo", "recipe/spin/main_spin.py"]
)
def test_import_program_with_another_algorithm_blocks(program: str, tmp_path: Path) -> None:
    start = f"python3 {program}" if program.endswith(".py") else f"python3 -m {program}"
    assert [line for line in translated("", tmp_path, start)[1].blockers if line.startswith(f"-m={program} (line 1): ")]


def test_import_unknown_program_is_listed(tmp_path: Path) -> None:
    _, draft, _ = translated("", tmp_path, "python3 -m my.main")
    assert [line for line in draft.changes if line.startswith("my.main is not one of verl's trainers")]
    _, draft, _ = translated("", tmp_path)
    assert not any("is not one of" in line for line in draft.changes)


@pytest.mark.parametrize("start", [f"{TORCHRUN} my.launch verl.trainer.sft_trainer", "c=$START; $c"])
def test_import_supervised_run_behind_a_launcher(start: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{start} model.path=/m data.train_files=/t data.max_length=64 engine=megatron optim.lr=3e-5\n")
    source, draft, _ = translate(read_verl(script, {}).settings)
    assert source.problems == []
    assert draft.values["algorithm.policy_loss.name"] == "sft"
    assert draft.values["actor.optimizer.lr"] == 3e-5


@pytest.mark.parametrize(
    ("overrides", "listed"),
    [("", True), ("algorithm.use_kl_in_reward=False", False), (f"{ACTOR}.use_kl_loss=True", False)],
)
def test_import_kl_coefficient_of_old_scripts_is_listed(overrides: str, listed: bool, tmp_path: Path) -> None:
    _, draft, _ = translated(f"algorithm.kl_ctrl.kl_coef=0.001 {overrides}", tmp_path)
    assert any("set algorithm.kl.in_reward" in line for line in draft.changes) == listed
    assert "algorithm.kl.in_reward" not in draft.values


def test_import_micro_batch_of_all_gpus_is_divided(tmp_path: Path) -> None:
    _, draft, _ = translated(f"{ACTOR}.ppo_micro_batch_size=16 trainer.n_gpus_per_node=4", tmp_path)
    assert any("ppo_micro_batch_size=16 responses on all GPUs together" in line for line in draft.changes)
    assert draft.values["actor.tokens_per_microbatch"] == 16 // 4 * 1024


def test_import_empty_model_is_to_decide(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'M=${M:-}\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path="$M" data.train_files=/t\n'
    )
    source, draft, _ = translate(read_verl(script, {}).settings)
    assert source.problems == []
    assert draft.choices[0].startswith("model.hf_path: actor_rollout_ref.model.path is empty")
    assert "model.hf_path" in str(rejection(commented_yaml(draft.values, draft.origins, "title")))


def test_import_path_with_an_argument_names_it(tmp_path: Path) -> None:
    source, _, _ = translated('data.val_files="$HOME/$2/test.parquet"', tmp_path)
    assert "add --set 2=VALUE" in "; ".join(source.problems)


@pytest.mark.parametrize(("key", "blocked"), [("videos", False), ("films", True)])
def test_import_complete_yaml_has_the_default_video_key(key: str, blocked: bool, tmp_path: Path) -> None:
    assert bool(yaml_draft(f"data: {{video_key: {key}}}\n", tmp_path).blockers) == blocked


def test_import_yaml_keeps_the_column_of_images(tmp_path: Path) -> None:
    draft = yaml_draft("data: {image_key: photos}\n", tmp_path)
    assert not draft.blockers
    assert draft.values["data.image_key"] == "photos"


def test_import_yaml_missing_value_is_left_out(tmp_path: Path) -> None:
    draft = yaml_draft("data:\n  train_batch_size: ???\n", tmp_path)
    assert draft.values["trainer.prompts_per_step"] == 1024


@pytest.mark.parametrize(
    ("options", "imported"),
    [
        (f"{ROLLOUT}.quantization=fp8", True),
        (f"{ROLLOUT}.quantization=fp8 {ROLLOUT}.name=sglang", False),
        (f"{ROLLOUT}.quantization=torchao", False),
    ],
)
def test_import_fp8_rollouts_need_vllm(options: str, imported: bool, tmp_path: Path) -> None:
    draft = translated(options, tmp_path)[1]
    assert draft.values.get("rollout.quantization") == ("fp8" if imported else None)
    assert len([line for line in draft.changes if f"{ROLLOUT}.quantization=" in line]) == 1


def test_import_quantization_aware_training_blocks(tmp_path: Path) -> None:
    assert "quantization-aware" in " ".join(translated(f"{ACTOR}.qat.enable=True", tmp_path)[1].blockers)
    _, draft, uncovered = translated(f"{ACTOR}.qat.mode=w4a16", tmp_path)
    assert draft.blockers == []
    assert uncovered == [f"{ACTOR}.qat.mode: quantization-aware training in verl's formats does not exist here"]


def test_import_yaml_reads_defaults_of_environment_variables(tmp_path: Path) -> None:
    text = "trainer: {nnodes: '${oc.env:NODES,3}'}\ndata: {train_files: '${oc.env:DATA}/a.parquet'}\n"
    draft = yaml_draft(text, tmp_path)
    assert draft.values["cluster.nodes"] == 3
    assert draft.values["data.train"] == ["${DATA}/a.parquet"]


@pytest.mark.parametrize("key", [f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.megatron.dtype"])
def test_import_float16_of_trainer_and_engine(key: str, tmp_path: Path) -> None:
    assert values_of(f"+{key}=float16 {ROLLOUT}.dtype=float16", tmp_path)["model.dtype"] == "float16"
    assert "model.dtype" not in values_of(f"+{key}=bfloat16 {ROLLOUT}.dtype=bfloat16", tmp_path)


@pytest.mark.parametrize(
    ("override", "dtype", "change"),
    [
        (f"+{ACTOR}.fsdp_config.dtype=fp16", "float16", "engines compute in float16, too (model.dtype)"),
        (f"{ROLLOUT}.dtype=half", None, "engines compute in the trainer's data type; model.dtype=float16 sets both"),
    ],
)
def test_import_float16_of_one_side_is_a_change(override: str, dtype: str | None, change: str, tmp_path: Path) -> None:
    _, draft, _ = translated(f"algorithm.adv_estimator=grpo {override}", tmp_path)
    assert draft.values.get("model.dtype") == dtype
    assert any(change in line for line in draft.changes)
