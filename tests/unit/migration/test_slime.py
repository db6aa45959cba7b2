"""Translation of slime's launch scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl.config.document import commented_yaml
from mcore_rl.errors import ConfigError
from mcore_rl.migration.acceptance import rejection
from mcore_rl.migration.draft import Draft
from mcore_rl.migration.slime.reader import read_slime
from mcore_rl.migration.slime.translation import translate
from mcore_rl.migration.source import Source

SCRIPTS = Path(__file__).parent / "scripts"
REQUIRED = "--hf-checkpoint /m --prompt-data /t.jsonl --num-rollout 8 --rollout-batch-size 16 --colocate"
EXPECTED: dict[str, dict[str, object]] = {
    "slime_grpo.sh": {
        "run.dir": "runs/moe_slime",
        "run.seed": 42,
        "model.hf_path": "/models/Qwen3-30B-A3B",
        "data.answer_key": "label",
        "data.val_sets": {"aime": ["/data/aime.jsonl"], "math": ["/data/math.jsonl"]},
        "reward.function": "math_boxed",
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss.name": "gspo",
        "algorithm.policy_loss.clip_high": 4e-4,
        "algorithm.loss_aggregation": "seq-mean-token-mean",
        "algorithm.kl.in_loss": 0.001,
        "algorithm.correction.kind": "truncate",
        "algorithm.dynamic_sampling.metric": "reward",
        "rollout.temperature": 0.8,
        "rollout.validation_temperature": 0.8,  # that of training
        "rollout.validation_top_p": 0.7,
        "rollout.num_engines": 2,
        "trainer.prompts_per_update": 16,  # 128 responses
        "actor.tokens_per_microbatch": 2048 + 8192,  # raised from 2 x 4096
        "actor.optimizer.cpu_offload": True,
        "actor.offload.params": True,
        "actor.offload.optimizer": None,
        "actor.moe.dispatcher": "alltoall",  # from the sourced file
        "cluster.nodes": 2,
    },
    "slime_async_ppo.sh": {
        "run.dir": "runs/slime_async_ppo",
        "data.template": "plain",
        "data.shuffle": False,
        "algorithm.advantage": "gae",
        "algorithm.lam": 0.95,
        "algorithm.loss_aggregation": "token-mean",
        "algorithm.kl.in_reward": 0.01,
        "algorithm.kl.reward_kind": "mse",
        "algorithm.policy_loss.clip_high": 0.1,  # that of --eps-clip
        "reward.function": "my_rewards:score",
        "trainer.prompts_per_update": 8,
        "trainer.critic_warmup_steps": 3,
        "cluster.placement": "disaggregated",
        "cluster.gpus_per_node": 8,
        "actor.num_ranks": 4,
        "critic.num_ranks": 4,
        "rollout.num_engines": 2,
        "rollout.max_staleness_hard": 1,
        "rollout.swap": "finish",
    },
}


def imported(name: str, rows: int | None = None) -> tuple[Source, Draft, list[str]]:
    return translate(read_slime(SCRIPTS / name, {}).settings, rows, Path(name).stem)


def translated(arguments: str, tmp_path: Path, program: str = "train.py") -> tuple[Source, Draft, list[str]]:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 {program} {REQUIRED} {arguments}\n")
    return translate(read_slime(script, {}).settings)


@pytest.mark.parametrize("name", EXPECTED)
def test_import_script_sets_expected_keys(name: str) -> None:
    source, draft, uncovered = imported(name)
    assert source.problems == []
    assert draft.blockers == []
    assert not any("not known" in line for line in uncovered)
    assert {key: draft.values.get(key) for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_import_result_passes_the_rules_of_plan(name: str) -> None:
    draft = imported(name)[1]
    assert rejection(commented_yaml(draft.values, draft.origins, "title")) is None


def test_import_epochs_with_rows_become_steps_and_warmup() -> None:
    _, draft, _ = imported("slime_async_ppo.sh", rows=800)
    assert draft.values["trainer.steps"] == 2 * 800 // 16
    assert draft.values["actor.optimizer.warmup_steps"] == 20  # a tenth of 100 steps of 2 updates
    _, draft, _ = imported("slime_async_ppo.sh")
    assert any(line.startswith("trainer.steps: --num-epoch=2") for line in draft.choices)


def test_import_lists_responses_against_prompts() -> None:
    _, draft, _ = imported("slime_grpo.sh")
    expected = (
        "an update counts responses in slime (--global-batch-size=128); trainer.prompts_per_update=16 counts prompts "
        "with 8 responses each"
    )
    assert expected in draft.changes


def test_import_supervised_script_trains_answers(tmp_path: Path) -> None:
    _, draft, _ = translated("--loss-type sft_loss --use-dynamic-batch-size --max-tokens-per-gpu 9216", tmp_path)
    assert draft.values["algorithm.policy_loss.name"] == "sft"
    assert draft.values["trainer.prompts_per_update"] == 16
    assert draft.values["rollout.max_response_tokens"] == 4608
    assert rejection(commented_yaml(draft.values, draft.origins, "title")) is None


def test_import_kl_coefficient_that_slime_ignores_is_left_out(tmp_path: Path) -> None:
    _, draft, _ = translated("--kl-coef 0.1", tmp_path)
    assert "algorithm.kl.in_reward" not in draft.values
    assert any(line.startswith("--kl-coef=0.1 is left out") for line in draft.changes)


def test_import_fully_asynchronous_recomputes(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    function = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    arguments = REQUIRED.replace("--colocate", f"--rollout-num-gpus 8 --rollout-function-path {function}")
    script.write_text(f"python3 train_async.py {arguments}\n")
    _, draft, _ = translate(read_slime(script, {}).settings)
    keys = ("rollout.swap", "rollout.nodes", "cluster.nodes", "rollout.max_staleness")
    assert [draft.values[key] for key in keys] == ["recompute", 1, 2, 1]


@pytest.mark.parametrize(("gpus", "delta"), [(8, True), (0, None)])
def test_import_weight_deltas_between_nodes_are_kept(gpus: int, delta: bool | None, tmp_path: Path) -> None:
    engines = f"--rollout-num-gpus {gpus}" if gpus else "--colocate"
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {REQUIRED.replace('--colocate', engines)} --update-weight-mode delta\n")
    _, draft, _ = translate(read_slime(script, {}).settings)
    assert draft.values.get("weights.delta") is delta
    assert any(line.startswith("--update-weight-mode=delta: differences") for line in draft.changes) == bool(delta)


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_import_weights_through_files_keep_their_directory(mode: str, tmp_path: Path) -> None:
    script, engines = tmp_path / "run.sh", REQUIRED.replace("--colocate", "--rollout-num-gpus 8")
    files = f"--update-weight-mode {mode} --update-weight-transport disk --update-weight-disk-dir /shared/updates"
    script.write_text(f"python3 train.py {engines} {files}\n")
    _, draft, _ = translate(read_slime(script, {}).settings)
    found = [draft.values.get(f"weights.{key}", False) for key in ("transport", "directory", "delta")]
    assert found == ["files", "/shared/updates", mode == "delta"]
    assert not [line for line in draft.changes if "differences" in line]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--rollout-repetition-penalty 1.1", "training samples from the unchanged softmax; set it to 1"),
        ("--use-opd", "distillation is not translated; set teacher.*"),
        ("--rm-type gpqa", "there is no such grader"),
        ("--custom-loss-function-path a.b", "algorithm.policy_loss.name=module_or_file.py:function"),
        ("--dynamic-sampling-filter-path my.filter", "groups are dropped if their rewards are equal"),
        ("--normalize-advantages", "advantages of grpo are not whitened"),
        ("--disable-rewards-normalization", "grpo subtracts the mean of a group"),
        ("--optimizer sgd", "the optimizer is Adam"),
        ("--use-unbiased-kl --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k2", "k2 is biased with and without"),
    ],
)
def test_import_argument_that_changes_training_is_a_blocker(arguments: str, reason: str, tmp_path: Path) -> None:
    _, draft, _ = translated(arguments, tmp_path)
    assert reason in " ".join(draft.blockers)


def test_import_truncated_sampling_keeps_the_sampled_sets(tmp_path: Path) -> None:
    _, draft, _ = translated("--rollout-top-p 0.9 --rollout-top-k 50 --rollout-min-p 0.1", tmp_path)
    assert not draft.blockers
    names = ("top_p", "top_k", "min_p", "keep_sampling_mask", "validation_min_p")
    assert [draft.values[f"rollout.{name}"] for name in names] == [0.9, 50, 0.1, True, 0.1]
    assert any("normalizes over the tokens that the engine sampled from" in line for line in draft.changes)
    assert "rollout.keep_sampling_mask" not in translated("--rollout-top-p 1", tmp_path)[1].values


def test_import_unbiased_kl_needs_a_kl_loss(tmp_path: Path) -> None:
    given = "--use-unbiased-kl --use-kl-loss --kl-loss-coef"
    found = {coef: translated(f"{given} {coef}", tmp_path)[1] for coef in (0, 0.1)}
    assert [draft.values.get("algorithm.kl.unbiased") for draft in found.values()] == [None, True]
    assert not any(draft.blockers for draft in found.values())


def test_import_without_engines_names_the_argument(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {REQUIRED.replace('--colocate', '')}\n")
    source, _, _ = translate(read_slime(script, {}).settings)
    assert source.problems == ["--rollout-num-gpus is not set, and --colocate neither: the engines have no GPUs"]


def test_import_trackers_and_recomputation_of_fsdp(tmp_path: Path) -> None:
    flags = "--use-wandb --wandb-project p --wandb-group g --train-backend fsdp --gradient-checkpointing"
    _, draft, uncovered = translated(flags, tmp_path)
    keys = ("observe.trackers", "observe.project", "observe.run_name", "actor.recompute")
    assert [draft.values.get(key) for key in keys] == [["wandb"], "p", "g", "full"]
    assert draft.values["actor.parallel.shard_parameters"] is True
    assert {key for key in draft.values if ".offload." in key} == {"actor.offload.params", "actor.offload.optimizer"}
    assert not any("not known" in line for line in uncovered)


@pytest.mark.parametrize("flag", ["--sglang-ep-size 8", "--sglang-expert-parallel-size 8", "--sglang-enable-ep-moe"])
def test_import_engine_that_spreads_experts(flag: str, tmp_path: Path) -> None:
    _, draft, uncovered = translated(f"{flag} --rollout-num-gpus-per-engine 8", tmp_path)
    assert draft.values["rollout.expert_parallel"] is True
    assert uncovered == []
    assert "rollout.expert_parallel" not in translated(f"{flag} --rollout-num-gpus-per-engine 1", tmp_path)[1].values


def test_import_engine_with_data_parallel_attention(tmp_path: Path) -> None:
    flags = "--sglang-enable-dp-attention --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head"
    _, draft, uncovered = translated(f"{flags} --rollout-num-gpus-per-engine 8", tmp_path)
    keys = ("rollout.tp", "rollout.expert_parallel", "rollout.data_parallel_attention")
    assert [draft.values.get(key) for key in keys] == [8, True, True]
    assert uncovered == []
    single = translated(f"{flags} --rollout-num-gpus-per-engine 1", tmp_path)[1].values
    assert "rollout.data_parallel_attention" not in single


def test_import_engine_with_float32_head(tmp_path: Path) -> None:
    _, draft, uncovered = translated("--sglang-enable-fp32-lm-head", tmp_path)
    assert draft.values["model.float32_head"] is True
    assert uncovered == []
    assert "model.float32_head" not in translated("--bf16", tmp_path)[1].values


def test_import_float16_with_its_loss_scale(tmp_path: Path) -> None:
    flags = "--initial-loss-scale 65536 --loss-scale-window 200 --hysteresis 1"
    _, draft, uncovered = translated(f"--fp16 {flags}", tmp_path)
    prefix = "actor.optimizer.loss_scale."
    found = {key.removeprefix(prefix): value for key, value in draft.values.items() if key.startswith(prefix)}
    assert (draft.values["model.dtype"], found) == ("float16", {"initial": 65536, "window": 200, "hysteresis": 1})
    assert uncovered == []
    assert "model.dtype" not in translated(flags, tmp_path)[1].values


def test_import_dense_model_has_no_expert_layout(tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
    assert "actor.parallel.etp" not in translated(flags, tmp_path)[1].values
    assert translated(f"{flags} --num-experts 8", tmp_path)[1].values["actor.parallel.etp"] == 1


def test_import_updates_per_rollout_are_named(tmp_path: Path) -> None:
    _, draft, _ = translated("--num-steps-per-rollout 4 --n-samples-per-prompt 8", tmp_path)
    assert draft.values["trainer.prompts_per_update"] == 4
    assert any("(--num-steps-per-rollout=4: 32 responses)" in line for line in draft.changes)


def test_import_configuration_of_evaluation_is_to_decide(tmp_path: Path) -> None:
    _, draft, _ = translated("--eval-config e.yaml", tmp_path)
    assert "--eval-config=e.yaml: is not read; set data.val or data.val_sets (docs/data.md)" in draft.choices


@pytest.mark.parametrize("name", ["grpo_gsm8k.sh", "trainer.yaml"])
def test_reader_file_of_verl_states_what_it_expects(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a slime launch script"):
        read_slime(SCRIPTS / name, {})


def test_read_several_commands_lists_those_that_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 other.py --hf-checkpoint /m\npython3 train.py {REQUIRED}\n")
    read = read_slime(path, {})
    assert read.command == "line 2, train.py"
    assert read.notes == ["line 1: another command, other.py, is not read"]
