"""Cross-section checks reject invalid settings before anything starts, naming the key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.rules.validation import validate
from mcore_rl.errors import ConfigError

HF = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "max_position_embeddings": 2048,
}

EXPERT_PARALLEL = ["rollout.expert_parallel=true", "rollout.tp=2"]
ATTENTION_DP = "rollout.data_parallel_attention=true"
SHARDED = "actor.parallel.shard_parameters=true"
TRANSFORMERS = "actor.strategy=fsdp2"
ENGINE_REPLAY = "actor.moe.router_replay=engine"


@pytest.fixture(autouse=True)
def _mixture_of_experts(base: str, tmp_path: Path) -> None:
    model_of(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["actor.parallel.tp=8"], "does not divide the 4 trainer ranks (actor.num_ranks, or cluster.nodes"),
        (["actor.num_ranks=5"], "actor.num_ranks"),
        (["cluster.placement=disaggregated", "actor.offload.grads=true"], "actor.offload.grads"),
        (["cluster.gpus_per_node=3", "actor.parallel.tp=2"], "does not divide the 3 trainer ranks"),
        (["trainer.prompts_per_step=32", "trainer.prompts_per_update=5"], "trainer.prompts_per_step"),
        (["algorithm.dynamic_sampling.enable=true", "rollout.samples_per_prompt=1"], "rollout.samples_per_prompt"),
        (["reward.overlong.enable=true", "reward.overlong.buffer_tokens=9999"], "reward.overlong.buffer_tokens"),
        (["rollout.max_response_tokens=4096", "actor.tokens_per_microbatch=8192"], "max_position_embeddings=2048"),
        (["actor.tokens_per_microbatch=1023"], "actor.tokens_per_microbatch=1023 must be at least"),
        (["actor.parallel.cp=2", "actor.tokens_per_microbatch=4098"], "multiple of 2 x actor.parallel.cp = 4"),
        (["reward.max_error_fraction=1.5"], "reward.max_error_fraction=1.5 must be at most 1"),
        (["rollout.temperature=0"], "algorithm.advantage=grpo learns from their differences; set rollout.temperature"),
        (["rollout.temperature=0", "algorithm.advantage=remax"], "rollout.temperature=0 makes all samples of a prompt"),
        (["algorithm.observation_coefficient=0.05"], "all tokens of a single-turn response are sampled"),
        (["algorithm.policy_loss.name=sft", "algorithm.observation_coefficient=0.05"], "texts without episodes"),
        (
            ["algorithm.policy_loss.name=real", "rollout.samples_per_prompt=1"],
            "rollout.samples_per_prompt=1; set it to",
        ),
        (["algorithm.advantage=gdpo"], "algorithm.advantage=gdpo needs algorithm.part_weights"),
        (["algorithm.advantage=gdpo", "algorithm.part_weights={a: 0}"], "algorithm.part_weights are all 0"),
        (
            ["algorithm.advantage=gdpo", "algorithm.part_weights={a: 1}", "algorithm.kl.in_reward=0.1"],
            "algorithm.kl.in_reward=0.1 changes the reward, but algorithm.advantage=gdpo reads the parts",
        ),
        (
            ["algorithm.advantage=maxrl", "algorithm.length_penalty=0.1"],
            "algorithm.length_penalty=0.1 changes the reward, but algorithm.advantage=maxrl needs rewards of at least",
        ),
        (
            ["algorithm.advantage=remax", "algorithm.length_penalty=0.1"],
            "algorithm.length_penalty=0.1: algorithm.advantage=remax compares with a greedy response",
        ),
        (["algorithm.advantage=maxrl", "reward.incorrect=-1"], "reward.incorrect=-1 changes the reward, but algorithm"),
        (["algorithm.advantage=maxrl", "reward.manager=dapo"], "reward.overlong (on by reward.overlong.enable or"),
        (["algorithm.advantage=maxrl", "rollout.temperature=0"], "learns from their differences"),
        (
            ["algorithm.advantage=optimal_token_baseline", "algorithm.correction.kind=truncate"],
            "algorithm.correction.kind=truncate weighs tokens, but the baseline of algorithm.advantage=optimal_token",
        ),
        (
            ["algorithm.advantage=optimal_token_baseline", "algorithm.corrections=[{kind: mask}]"],
            "algorithm.corrections: kind=mask weighs tokens, but the baseline of algorithm.advantage=optimal_token",
        ),
        (
            ["algorithm.advantage=optimal_token_baseline", "rollout.quantization=fp8"],
            "algorithm.correction.kind=auto weighs tokens with rollout.quantization=fp8",
        ),
        (
            ["algorithm.baseline=source", "observe.keep_trajectories=2"],
            "observe.keep_trajectories=2 does not store the data_source of responses",
        ),
        (
            ["algorithm.advantage=gdpo", "algorithm.part_weights={a: 1}", "observe.keep_trajectories=2"],
            "observe.keep_trajectories=2 does not store the parts of the rewards, which algorithm.advantage=gdpo needs",
        ),
        (["algorithm.policy_loss.name=sft", "algorithm.per_source=[{source: a}]"], "have no effect with algorithm.pol"),
        (["algorithm.normalize_by_std=false", "algorithm.std_level=batch"], "algorithm.std_level=batch has no effect"),
        (["algorithm.std_level=step"], "algorithm.std_level=step must be one of group, batch, batch_rewards"),
        (["rollout.engine=trtllm"], "rollout.engine"),
        (["rollout.overlap_schedule=true"], "but rollout.engine=vllm; set rollout.overlap_schedule=false"),
        (["model.dtype=float8"], "model.dtype"),
        (["model.hf_path=/nowhere"], "model.hf_path"),
        (["trainer.prompts_per_step=1", "trainer.prompts_per_update=1", "rollout.samples_per_prompt=2"], "at least 4"),
        (["rollout.nodes=1"], "rollout.nodes=1 reserves nodes for engines; set cluster.placement=disaggregated"),
        (["cluster.placement=disaggregated", "rollout.nodes=1"], "rollout.nodes=1 of cluster.nodes=1 leave no node"),
        (
            ["cluster.placement=disaggregated", "cluster.nodes=2", "rollout.nodes=1", "actor.num_ranks=8"],
            "cluster.gpus_per_node less rollout.nodes offers 4",
        ),
        ([SHARDED, "actor.parallel.pp=2"], "actor.parallel.pp=2 is not supported with actor.parallel.shard_parameters"),
        ([SHARDED, "actor.distributed_optimizer=false"], "like the parameters; set it to true"),
        ([SHARDED, "actor.overlap_grad_reduce=true"], "actor.overlap_grad_reduce=True is not supported"),
        ([SHARDED, "actor.overlap_param_gather=true"], "actor.overlap_param_gather=True is not supported"),
        ([SHARDED, "actor.optimizer.cpu_offload=true"], "actor.optimizer.cpu_offload=True is not supported"),
        ([SHARDED, "actor.offload.grads=true"], "actor.offload.grads=True is not supported"),
        ([SHARDED, "actor.fp8=delayed"], "actor.fp8=delayed is not supported"),
        ([TRANSFORMERS, "actor.parallel.pp=2"], "actor.parallel.pp=2 is not supported with actor.strategy=fsdp2"),
        ([TRANSFORMERS, "actor.parallel.tp=2"], "only data-parallel; set it to 1"),
        ([TRANSFORMERS, "actor.parallel.cp=2"], "actor.parallel.cp=2 is not supported with actor.strategy=fsdp2"),
        ([TRANSFORMERS, "actor.parallel.etp=2"], "actor.parallel.etp=2 is not supported with actor.strategy=fsdp2"),
        ([TRANSFORMERS, "actor.moe.dispatcher=alltoall"], "actor.moe.dispatcher=alltoall is not supported with"),
        ([TRANSFORMERS, "actor.recompute=selective"], "recompute whole layers; set it to full or none"),
        ([TRANSFORMERS, "actor.recompute=full", "actor.recompute_layers=2"], "layer by layer; set it to 1"),
        ([TRANSFORMERS, "actor.mtp_loss_coefficient=0.1"], "no multi-token-prediction layers; set it to 0"),
        ([TRANSFORMERS, "actor.offload.grads=true"], "actor.offload.grads=True is not supported with actor.strategy"),
        (["rollout.tp=3"], "rollout.tp=3 must divide the model's 4 attention heads"),
        (["rollout.validation_samples=2"], "rollout.validation_temperature"),
        (["weights.transport=files"], "weights.transport=files needs weights.directory; set it to a directory"),
        (["weights.directory=/w"], "weights.directory=/w has no effect; set weights.transport=files, or leave"),
        (["rollout.draft=eagle"], "rollout.draft=eagle must be one of none, ngram, mtp"),
        (["rollout.draft_tokens=2"], "rollout.draft_tokens=2 has no effect; set rollout.draft, or leave"),
        (["rollout.draft_below=8"], "rollout.draft_below=8 has no effect; set rollout.draft, or leave"),
        (["rollout.draft=ngram", "rollout.engine=sglang"], "rollout.draft=ngram needs rollout.engine=vllm"),
        (
            ["rollout.draft=mtp", "rollout.engine=sglang", "actor.mtp_loss_coefficient=0.1"],
            "rollout.draft=mtp needs rollout.engine=vllm",
        ),
        (["rollout.draft=mtp"], "rollout.draft=mtp needs actor.mtp_loss_coefficient above 0"),
        (
            ["rollout.draft=ngram", "rollout.draft_below=128", "rollout.max_batched_tokens=635"],
            "rollout.max_batched_tokens=635 must be at least 636",
        ),
        (["rollout.max_batched_tokens=255"], "rollout.max_batched_tokens=255 must be at least"),
        (["rollout.expert_parallel=true"], "set rollout.tp above 1"),
        ([ATTENTION_DP, *EXPERT_PARALLEL], f"{ATTENTION_DP} needs rollout.engine=sglang"),
        ([ATTENTION_DP, "rollout.engine=sglang", "rollout.tp=2"], "set rollout.expert_parallel=true, or it to false"),
        (
            [ATTENTION_DP, "rollout.engine=sglang", *EXPERT_PARALLEL, "rollout.max_concurrent_requests=33"],
            "divides rollout.max_concurrent_requests=33 among rollout.tp=2 ranks; set it to a multiple of 2",
        ),
        (["algorithm.kl.unbiased=true"], "algorithm.kl.unbiased=True has no effect; set algorithm.kl.in_loss above 0"),
        (
            ["algorithm.kl.in_loss=0.1", "algorithm.kl.unbiased=true", "algorithm.kl.loss_kind=mse"],
            "not algorithm.kl.loss_kind=mse; set it to one of k1, low_var, k3",
        ),
        (
            ["algorithm.high_entropy_share=0.2", "algorithm.policy_loss.name=sft"],
            "algorithm.high_entropy_share=0.2: algorithm.policy_loss.name=sft trains on all target tokens; set it to 1",
        ),
        (["algorithm.entropy_control.step=0.1"], "has no effect; set algorithm.entropy_control.target, or leave"),
        (
            ["algorithm.entropy_control.target=0.2", "algorithm.policy_loss.name=sft"],
            "algorithm.entropy_control.target=0.2: algorithm.policy_loss.name=sft does not explore; set it to null",
        ),
        (
            ["algorithm.entropy_control.target=0.2", "algorithm.entropy_coefficient=-0.1"],
            "algorithm.entropy_coefficient=-0.1 must be between algorithm.entropy_control.minimum=0.0",
        ),
        (["algorithm.high_entropy_share=0"], "algorithm.high_entropy_share=0.0 must be above 0"),
        (["algorithm.drift_penalty.anchor=old"], "set algorithm.drift_penalty.coefficient above 0"),
        (
            ["algorithm.drift_penalty.coefficient=0.1", "algorithm.policy_loss.name=sft"],
            "algorithm.drift_penalty.coefficient=0.1: algorithm.policy_loss.name=sft trains on no samples",
        ),
        ([ENGINE_REPLAY, "algorithm.policy_loss.name=sft"], f"{ENGINE_REPLAY} replays what the engine chose"),
        (["data.long_prompts=cut"], "data.long_prompts"),
        (["rollout.tool_parser=hermes"], "rollout.tool_parser=hermes has no effect; set rollout.tools, or leave"),
        (["rollout.max_tool_seconds=5"], "rollout.max_tool_seconds=5.0 has no effect; set rollout.tools"),
        (["rollout.tools=tools.yaml", "rollout.max_tool_seconds=0"], "rollout.max_tool_seconds=0.0 must be above 0"),
        (["rollout.tools=t.yaml", "rollout.tool_parser=xml"], "rollout.tool_parser=xml must be one of auto, hermes"),
        (["rollout.tools=tools.yaml", "rollout.tool_answer_keep=left"], "must be one of start, end, both"),
        (["actor.overlap_param_gather=true"], "actor.overlap_grad_reduce=true"),
        (
            ["actor.overlap_param_gather=true", "actor.overlap_grad_reduce=true", "actor.distributed_optimizer=false"],
            "actor.distributed_optimizer=true",
        ),
    ],
)
def test_validate_invalid_settings_name_the_key(base: str, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_config(base, overrides))
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.parallel.tp=2", "actor.parallel.ep=2", "trainer.prompts_per_update=16"],
        [ENGINE_REPLAY, "rollout.draft=ngram", "rollout.draft_tokens=2", "rollout.draft_below=8"],
        ["rollout.draft=ngram", "rollout.draft_below=300", "rollout.max_batched_tokens=1280"],
        [ENGINE_REPLAY, "rollout.draft=mtp", "actor.mtp_loss_coefficient=0.1"],
        ["rollout.temperature=0", "rollout.top_p=0.5", "rollout.min_p=0.1", "algorithm.policy_loss.name=sft"],
        ["rollout.overlap_schedule=true", "rollout.engine=sglang"],
        ["rollout.keep_sampling_mask=true", "rollout.top_p=0.9", "rollout.draft=ngram", "rollout.draft_below=8"],
        ["rollout.keep_sampling_mask=true", "rollout.top_k=50", "rollout.min_p=0.1"],
        [
            *("rollout.validation_samples=32", "rollout.validation_temperature=1", "rollout.validation_top_p=0.7"),
            *("rollout.validation_top_k=40", "rollout.validation_min_p=0.1"),
            *("rollout.validation_repetition_penalty=1.2", "rollout.min_p=0", "rollout.repetition_penalty=1"),
        ],
    ],
)
def test_validate_valid_configuration_writes_nothing(base: str, tmp_path: Path, overrides: list[str]) -> None:
    validate(load_config(base, overrides))
    assert not (tmp_path / "run").exists()


def test_num_trainer_ranks_defaults_to_all_slots(base: str) -> None:
    assert load_config(base, ["cluster.nodes=2"]).num_trainer_ranks == 8
    assert load_config(base, ["actor.num_ranks=2"]).num_trainer_ranks == 2
    assert load_config(base, ["cluster.nodes=3", "rollout.nodes=2"]).num_trainer_ranks == 4


def test_validate_run_dir_is_a_file_is_rejected(base: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir"):
        validate(load_config(base, [f"run.dir={tmp_path}/taken"]))


def model_of(tmp_path: Path, **changes: object) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF | changes))


def test_check_engine_sizes_tp_divides_or_replicates_kv_heads(base: str, tmp_path: Path) -> None:
    for tp in (1, 2, 4):
        validate(load_config(base, [f"rollout.tp={tp}"]))
    model_of(tmp_path, num_attention_heads=12, num_key_value_heads=4)
    with pytest.raises(ConfigError, match=r"rollout\.tp=6 must divide the model's 4 key-value heads"):
        validate(load_config(base, ["rollout.tp=6"]))


def test_check_engine_sizes_attention_dp_divides_no_heads(base: str, tmp_path: Path) -> None:
    overrides = ["rollout.engine=sglang", *EXPERT_PARALLEL, "rollout.tp=8", "cluster.device=cuda"]
    model_of(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"rollout\.tp=8 must divide the model's 4 attention heads"):
        validate(load_config(base, overrides))
    validate(load_config(base, [*overrides, ATTENTION_DP]))
    model_of(tmp_path, num_experts=12)
    with pytest.raises(ConfigError, match=r"rollout\.tp=8: SGLang needs num_experts to be a multiple of 8, .* has 12"):
        validate(load_config(base, [*overrides, ATTENTION_DP]))


def test_check_engine_sizes_draft_tokens_reuse_all_draft_layers(base: str, tmp_path: Path) -> None:
    drafts = ["rollout.draft=mtp", "actor.mtp_loss_coefficient=0.1"]
    for layers, tokens in ((1, 5), (2, 1), (2, 4)):
        model_of(tmp_path, num_nextn_predict_layers=layers)
        validate(load_config(base, [*drafts, f"rollout.draft_tokens={tokens}"]))
    message = r"rollout\.draft_tokens=3 must be a multiple of the model's 2 multi-token-prediction layers"
    with pytest.raises(ConfigError, match=message):
        validate(load_config(base, [*drafts, "rollout.draft_tokens=3"]))
    validate(load_config(base, ["rollout.draft=ngram", "rollout.draft_tokens=3"]))


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_check_engine_sizes_expert_parallel_needs_experts(base: str, tmp_path: Path, key: str) -> None:
    overrides = [*EXPERT_PARALLEL, "cluster.device=cuda"]
    model_of(tmp_path, num_experts=None)
    with pytest.raises(ConfigError, match=r"rollout\.expert_parallel=true, but the model has no experts"):
        validate(load_config(base, overrides))
    model_of(tmp_path, **{"num_experts": None, key: 8})
    validate(load_config(base, overrides))
    model_of(tmp_path, **{"num_experts": None, key: 1})
    with pytest.raises(ConfigError, match=r"rollout\.tp=2 ranks, but there are only 1 experts"):
        validate(load_config(base, overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0", "rollout.temperature=0 is greedy sampling, which has no distribution"),
        ("rollout.temperature=0.009", "rollout.temperature=0.009 is below 0.01, to which the engine raises it"),
        ("rollout.temperature=2.5", "rollout.temperature=2.5 must be at most 2"),
        ("rollout.validation_temperature=2.5", "rollout.validation_temperature=2.5 must be at most 2"),
        ("rollout.top_p=0.99", "rollout.top_p=0.99 samples from fewer tokens than the full softmax"),
        (
            "rollout.top_k=50",
            "that the trainer computes; set it to -1, or rollout.keep_sampling_mask=true. Validation may use rollout.",
        ),
        (
            "rollout.keep_sampling_mask=true",
            "rollout.keep_sampling_mask=true has no effect on sampling from all tokens; set rollout.top_p below 1",
        ),
        ("rollout.min_p=0.05", "rollout.min_p=0.05 samples from fewer tokens than the full softmax"),
        (
            "rollout.repetition_penalty=1.1",
            "rollout.repetition_penalty=1.1 changes the probabilities of earlier tokens",
        ),
        ("rollout.repetition_penalty=0.9", "Validation may use rollout.validation_repetition_penalty"),
        ("rollout.validation_repetition_penalty=2.5", "rollout.validation_repetition_penalty=2.5 must be at most 2"),
        ("rollout.top_k=0", "rollout.top_k=0 leaves no token"),
        ("rollout.validation_top_k=0", "rollout.validation_top_k=0 leaves no token"),
        ("rollout.validation_top_k=-2", "rollout.validation_top_k=-2 must be at least -1"),
    ],
)
def test_check_sampling_untrained_distribution_is_rejected(base: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(load_config(base, [override, "algorithm.advantage=reinforce_plus_plus"]))


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("['']", "rollout.stop=[''] has an empty text, which would end every response at once"),
        ("[a, '']", "has an empty text"),
        (f"[{', '.join('abcdefghijklmnopq')}]", "has 17 texts, but may have 16"),
        (f"[{'a' * 257}]", "has a text of 257 characters, but may have 256 in each"),
        ("{a: 1}", "rollout.stop"),
        ("[[a]]", "rollout.stop"),
        ("[null]", "rollout.stop"),
    ],
)
def test_check_sampling_invalid_stop_strings_are_rejected(base: str, stop: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(load_config(base, [f"rollout.stop={stop}"]))


def test_load_config_single_stop_string_becomes_a_list(base: str) -> None:
    for given, expected in (
        ("</answer>", ["</answer>"]),
        ('["\\n\\n", "Human:"]', ["\n\n", "Human:"]),
        ("Human:", ["Human:"]),
    ):
        config = load_config(base, [f"rollout.stop={given}"])
        validate(config)
        assert config.rollout.stop == expected
    assert load_config(base).rollout.stop == []


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"hidden_size": ' + "1" * 400 + "}"])
def test_read_hf_config_invalid_json_is_rejected(base: str, tmp_path: Path, content: str) -> None:
    (tmp_path / "model" / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.hf_path: .*config\.json cannot be read"):
        validate(load_config(base))


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"])
@pytest.mark.parametrize("count", ["8", 0, 1.5, True, [8]])
def test_check_engine_sizes_invalid_count_is_named(base: str, tmp_path: Path, name: str, count: object) -> None:
    model_of(tmp_path, **{name: count})
    with pytest.raises(ConfigError, match=rf"model\.hf_path: config\.json: {name} is .* whole number of at least 1"):
        validate(load_config(base))


@pytest.mark.parametrize("outside", [True, False])
def test_check_engine_sizes_tokens_beyond_short_longrope_are_rejected(base: str, tmp_path: Path, outside: bool) -> None:
    original = {"original_max_position_embeddings": 256}
    rope = {"type": "longrope", **({} if outside else original)}
    model_of(tmp_path, rope_scaling=rope, **(original if outside else {}))
    keys = ["rollout.max_prompt_tokens=128", "rollout.max_response_tokens=128"]
    validate(load_config(base, keys))
    message = r"max_prompt_tokens \+ rollout\.max_response_tokens = 257 exceeds .* rope_scaling\.original_max_position_"
    with pytest.raises(ConfigError, match=message):
        validate(load_config(base, [keys[0], "rollout.max_response_tokens=129"]))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_check_engine_sizes_positions_beyond_yarn_are_rejected(base: str, tmp_path: Path, name: str) -> None:
    """vLLM precomputes factor * original positions and does not check an index into the table."""
    for factor, fits in ((4, False), (8, True)):
        rope = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 256}
        (tmp_path / "model" / "config.json").write_text(json.dumps({**HF, name: rope}))
        config = load_config(base, ["rollout.max_prompt_tokens=1000", "rollout.max_response_tokens=1000"])
        config.actor.tokens_per_microbatch = 4000
        if fits:
            validate(config)
        else:
            with pytest.raises(ConfigError, match=rf"{name}\.factor \* original_max_position_embeddings=1024"):
                validate(config)
