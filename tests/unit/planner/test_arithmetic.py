"""Batches, caches, FLOP and pipelines compared with values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import load_config
from mcore_rl.config.models import ActorConfig, TeacherConfig, TeacherSourceConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import Config
from mcore_rl.planner.activations import _output_projection_bytes, in_flight, layer_table
from mcore_rl.planner.engine import GIB, EngineRank, engine_rank, kv_bytes_per_token, tensor_bytes
from mcore_rl.planner.layers.execution import Execution
from mcore_rl.planner.model_size import bound_rows, model_size, parameters_by_rank
from mcore_rl.planner.times import StepTimes
from mcore_rl.planner.workload import (
    StepFlops,
    batch_arithmetic,
    forward_flops,
    passes_before_updates,
    step_flops,
    teacher_flops,
    with_value_models,
)
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.resolved.model import policy_config
from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters.mapping.layout import TrainLayout

ON_512 = TrainLayout(512, pp=16, ep=32, first_stage_layers=3, last_stage_layers=2)


@pytest.fixture(scope="module")
def deepseek() -> Config:
    return load_config("configs/dapo_deepseek_v3_671b.yaml")


def test_parameters_of_deepseek_v3(deepseek: Config) -> None:
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    rows = bound_rows(hf_config, torch.bfloat16)
    size = model_size(hf_config, rows)
    assert size.total == 671_026_404_352
    # The report gives 37 billion per token; here both embeddings count.
    assert size.active == pytest.approx(37.55e9, rel=1e-3)
    held = parameters_by_rank(rows, ON_512)
    assert held.shape == (512,)
    assert (held[:32] == held[0]).all()
    # Each expert is on one rank of its stage, all other weights are on 32 ranks.
    assert held.sum() == size.experts + 32 * (size.total - size.experts)


def test_batch_of_the_671b_run(deepseek: Config) -> None:
    batch = batch_arithmetic(deepseek, ON_512)
    assert (batch.responses, batch.updates, batch.responses_per_update) == (4096, 8, 512)
    assert batch.responses_per_rank == 16
    assert (batch.microbatches, batch.most_microbatches) == (4, 8)


def test_caches() -> None:
    latent = {"multi_latent_attention": True, "kv_lora_rank": 512, "qk_pos_emb_head_dim": 64}
    assert kv_bytes_per_token(latent, 32, 2, num_layers=61) == 61 * 576 * 2
    grouped = {"num_query_groups": 8, "kv_channels": 128}
    assert kv_bytes_per_token(grouped, 4, 2, num_layers=64) == 64 * 2 * 2 * 128 * 2
    assert kv_bytes_per_token(grouped, 16, 2, num_layers=64) == 64 * 2 * 1 * 128 * 2


def test_an_engine_of_one_rank_holds_the_model(deepseek: Config) -> None:
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    rows = bound_rows(hf_config, torch.bfloat16)
    biases = 58 * 256  # biases of the routers: not parameters, but weights of the engine
    assert sum(tensor_bytes(rows, EngineLayout(), 2).values()) == 2 * (model_size(hf_config, rows).total + biases)


def test_quantised_weights_take_a_byte_and_a_scale_per_block(deepseek: Config) -> None:
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    rows = bound_rows(hf_config, torch.bfloat16)
    whole, quantised = (tensor_bytes(rows, EngineLayout(), 2, kind) for kind in ("none", "fp8"))
    marked = {
        bound.mcore.rstrip("0123456789") if bound.expert is not None else bound.mcore for bound in rows if bound.row.fp8
    }
    for name, size in whole.items():
        assert quantised[name] == pytest.approx(size / 2 * (1 + 4 / 128**2) if name in marked else size)
    # The checkpoint in FP8 has 688.6e9 bytes, 11.5e9 of them for the multi-token-prediction layer, which engines lack.
    assert sum(quantised.values()) == pytest.approx(674e9, rel=0.01)


def test_int4_experts_take_four_bits_and_a_scale_per_group(deepseek: Config) -> None:
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    rows = bound_rows(hf_config, torch.bfloat16)
    whole = tensor_bytes(rows, EngineLayout(), 2)
    for group in (32, 128):
        quantised = tensor_bytes(rows, EngineLayout(), 2, "int4", group)
        for name, size in whole.items():
            is_expert = ".experts.linear_fc" in name
            assert quantised[name] == pytest.approx(size * (4 + 16 / group) / 16 if is_expert else size)


def test_engine_rank_of_sglang_adds_workspace_and_graphs(deepseek: Config) -> None:
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    rows, arguments = bound_rows(hf_config, torch.bfloat16), model_arguments(hf_config)

    def rank(**changes: object) -> EngineRank:
        rollout = replace(deepseek.rollout, **changes)  # type: ignore[arg-type]
        return engine_rank(rollout, deepseek.cluster, rows, arguments, element_bytes=2, cuda=True)

    vllm, sglang, eager = rank(), rank(engine="sglang"), rank(engine="sglang", enforce_eager=True)
    fraction = int(0.6 * 96 * GIB)
    # vLLM's fraction also contains the memory that stays during sleep.
    assert vllm.total_bytes == fraction
    assert sglang.weights_bytes + sglang.kv_cache_bytes == fraction
    assert sglang.total_bytes == fraction + sglang.workspace_bytes + 5 * GIB
    assert sglang.sequences == pytest.approx(sglang.kv_cache_bytes / (61 * 576 * 2 * 10240))
    assert [each.asleep_bytes for each in (vllm, sglang, eager)] == [GIB, 5 * GIB, GIB]
    assert eager.total_bytes == sglang.total_bytes - 4 * GIB


def test_engine_rank_of_a_teacher_adds_logits_of_one_pass(deepseek: Config) -> None:
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    rows, arguments = bound_rows(hf_config, torch.bfloat16), model_arguments(hf_config)

    def total(tokens: int, *, scores_prompts: bool) -> int:
        rollout = replace(deepseek.rollout, max_batched_tokens=tokens)
        return engine_rank(
            rollout, deepseek.cluster, rows, arguments, element_bytes=2, cuda=True, scores_prompts=scores_prompts
        ).total_bytes

    # Per token and entry of the vocabulary: 2 bytes of the logit, and 4 of its log-probability.
    assert total(2048, scores_prompts=True) == total(2048, scores_prompts=False) + 2048 * 129_280 * 6


def test_engine_rank_attention_dp_divides_requests_and_experts(deepseek: Config) -> None:
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    rows, arguments = bound_rows(hf_config, torch.bfloat16), model_arguments(hf_config)
    divided = replace(
        deepseek.rollout, engine="sglang", expert_parallel=True, gpu_memory_fraction=0.9, validation_top_p=1.0
    )
    rollout = replace(divided, data_parallel_attention=True)
    rank = engine_rank(rollout, deepseek.cluster, rows, arguments, element_bytes=2, cuda=True)
    size = model_size(hf_config, rows)
    biases = 58 * 256
    assert rank.weights_bytes == 2 * (size.total - size.experts + biases + size.experts // 32)
    assert rank.sequences == pytest.approx(rank.kv_cache_bytes / (61 * 576 * 2 * 10240))
    assert rank.engine_sequences == 32 * rank.sequences
    other = engine_rank(divided, deepseek.cluster, rows, arguments, element_bytes=2, cuda=True)
    assert (other.engine_sequences, other.kv_bytes_per_token) == (other.sequences, rank.kv_bytes_per_token)
    # The rank has 1/32 of the hidden states and of the rows of logits, which all are as long as the vocabulary.
    hidden_states = 4 * 7168 * 10240 * 2
    logits = 8 * rollout.max_concurrent_requests * 129_280
    assert rank.workspace_bytes == pytest.approx(other.workspace_bytes - (hidden_states + logits) * 31 / 32, abs=2)


def test_flop_of_a_token(deepseek: Config) -> None:
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    arguments, size = model_arguments(hf_config), model_size(hf_config, bound_rows(hf_config, torch.bfloat16))
    embedding = 129_280 * 7_168
    # Without attention to other tokens: two FLOP per active weight, except for the embedding, which is looked up.
    assert forward_flops(arguments, size, 0, 1.0) == pytest.approx(2 * (size.active - embedding))
    attention = forward_flops(arguments, size, 1000, 1.0) - forward_flops(arguments, size, 0, 1.0)
    assert attention == 61 * 128 * 2 * (192 + 128) * 500
    flops = step_flops(
        deepseek.actor,
        deepseek.trainer.update_epochs,
        arguments,
        size,
        batch := batch_arithmetic(deepseek, ON_512),
        passes=passes_before_updates(deepseek, batch),
    )
    # With full recomputation an update takes four forward passes. The first of eight updates needs no separate one.
    assert flops.update == pytest.approx(4 * flops.generate)
    assert flops.logp == pytest.approx(7 / 8 * flops.generate)


def test_flop_and_seconds_of_a_teacher(deepseek: Config) -> None:
    """A teacher with the policy's model costs on the ranks what a pass of the policy costs."""
    batch = batch_arithmetic(deepseek, ON_512)
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    arguments, size = model_arguments(hf_config), model_size(hf_config, bound_rows(hf_config, torch.bfloat16))
    one_pass = step_flops(deepseek.actor, 1, arguments, size, batch).generate
    given = {"in_advantage": 1.0, "hf_path": deepseek.model.hf_path}
    plan = replace(deepseek.plan, peak_tflops=1000.0, mfu_logp=0.5, mfu_prefill=0.25)

    def of(**keys: Any) -> tuple[float, float | None]:
        config = replace(deepseek, plan=plan, teacher=TeacherConfig(**(given | keys)))
        config.model = replace(config.model, dtype="bfloat16")
        flops = StepFlops(1.0, 1.0, 1.0, teacher_flops(config, batch))
        seconds = StepTimes(config, flops, batch, EngineRank(1, 0, 1, 1, 1.0)).synchronous(512, 1).teacher
        return flops.teacher, seconds

    assert of() == pytest.approx((one_pass, one_pass / (512 * 0.5e15)))
    # The logits of prompts: one more row of the output projection per prompt token.
    prompts = batch.responses * batch.mean_prompt * 2 * 129_280 * 7_168
    engines = one_pass + prompts
    assert of(num_engines=4, tp=8) == pytest.approx((engines, engines / (32 * 0.25e15)))
    two = [TeacherSourceConfig("a", deepseek.model.hf_path)]
    assert of(num_engines=4, tp=8, by_source=two) == pytest.approx((engines, engines / (64 * 0.25e15)))
    assert of(num_ranks=64) == pytest.approx((one_pass, one_pass / (64 * 0.5e15)))
    assert of(hf_path=None, url="http://a/v1") == (0.0, 0.0)
    assert of(hf_path=None, moving_average=0.9)[0] == pytest.approx(one_pass)
    # Prompts with hints twice as long as the policy's: at least the weights' part of the pass grows.
    deepseek.data.hint_key, deepseek.data.max_hinted_tokens = "answer", 2 * deepseek.rollout.max_prompt_tokens
    longer = batch.mean_prompt / batch.mean_tokens
    assert of()[0] > (1 + 0.9 * longer) * one_pass


def test_flop_and_seconds_of_critic_and_reward_model(deepseek: Config) -> None:
    """Value models of the policy's kind have no output projection. Each has its own number of ranks."""
    batch = batch_arithmetic(deepseek, ON_512)
    hf_config, _ = policy_config(ModelRole.policy(deepseek.actor, deepseek.model))
    arguments, size = model_arguments(hf_config), model_size(hf_config, bound_rows(hf_config, torch.bfloat16))
    policy = step_flops(deepseek.actor, 1, arguments, size, batch)
    one_pass = policy.generate - batch.responses * batch.mean_response * 2 * 129_280 * 7_168
    config = replace(deepseek, plan=replace(deepseek.plan, peak_tflops=1000.0, mfu_logp=0.5, mfu_update=0.25))
    config.model = replace(config.model, dtype="bfloat16")
    assert with_value_models(policy, config, batch, cuda=True) == policy
    config.algorithm = replace(config.algorithm, advantage="gae")
    config.trainer = replace(config.trainer, update_epochs=2)
    config.critic = replace(config.critic, num_ranks=128, update_epochs=3, recompute="full")
    config.reward_model = replace(config.reward_model, hf_path=deepseek.model.hf_path)
    flops = with_value_models(policy, config, batch, cuda=True)
    # Full recomputation: an update takes four forward passes.
    wanted = one_pass, 4 * 2 * 3 * one_pass, one_pass
    assert (flops.values, flops.value_update, flops.reward_model) == pytest.approx(wanted, rel=1e-5)
    times = StepTimes(config, flops, batch, EngineRank(1, 0, 1, 1, 1.0))
    seconds = times.synchronous(512, 1)
    critic, scores = one_pass / (128 * 0.5e15) + 24 * one_pass / (128 * 0.25e15), one_pass / (512 * 0.5e15)
    assert (seconds.critic, seconds.reward_model) == pytest.approx((critic, scores), rel=1e-5)
    alone = StepTimes(config, policy, batch, times.engine).train_seconds(512)
    assert alone is not None
    assert times.train_seconds(512) == pytest.approx(alone + critic + scores, rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "microbatches", "alive"),
    [
        (TrainLayout(4, pp=4), 8, [[4], [3], [2], [1]]),
        (TrainLayout(4, pp=4), 2, [[2], [2], [2], [1]]),
        (TrainLayout(2, pp=2, vpp=2), 4, [[3, 2], [2, 1]]),
        (TrainLayout(1), 5, [[1]]),
    ],
)
def test_micro_batches_in_flight(layout: TrainLayout, microbatches: int, alive: list[list[int]]) -> None:
    assert [in_flight(layout, stage, microbatches) for stage in range(layout.pp)] == alive


@pytest.mark.parametrize("hf_tensors", [False, True])
def test_layer_table_of_latent_attention_has_probabilities_on_cpu_only(deepseek: Config, hf_tensors: bool) -> None:
    """On CUDA a fused kernel of torch accepts values (128) of another size than keys (192)."""
    sizes = model_arguments(policy_config(ModelRole.policy(deepseek.actor, deepseek.model))[0]).transformer
    layout = TrainLayout(8, shard_parameters=True, hf_tensors=hf_tensors)

    def total(*, cuda: bool, length: float) -> float:
        run = Execution(ActorConfig(), layout, 2, fused=False, cuda=cuda, imbalance=1.0, square_length=length)
        return sum(tensor.bytes_per_token for tensor in layer_table(sizes, run, sparse=True))

    assert total(cuda=True, length=1000) == total(cuda=True, length=1)
    assert total(cuda=False, length=1000) - total(cuda=False, length=1) == 128 * 999 * 2


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        # Two updates in each of two epochs.
        ([], 0.5),
        (["algorithm.old_logp=rollout"], 0),
        (["algorithm.policy_loss.name=reinforce"], 0),
        (["algorithm.old_logp=rollout", "algorithm.kl.in_reward=0.1"], 0.5 + 0.5 + 1),
        (["algorithm.old_logp=rollout", "actor.moe.router_replay=policy"], 0.5),
        (["actor.moe.router_replay=engine"], 0.5 + 1 / 10),
        (["algorithm.kl.in_loss=0.1"], 0.5 + 1),
        (["algorithm.high_entropy_share=0.2"], 0.5 + 2),
        (["algorithm.policy_loss.name=clip_cov"], 0.5 + 2),
        # Before all updates of two epochs except the first, which has half of the samples.
        (["algorithm.policy_loss.name=real"], 0.5 + 1.5),
        (["algorithm.policy_loss.name=real", "algorithm.old_logp=rollout"], 2),
        (
            ["algorithm.policy_loss.name=real", "teacher.url=http://a/v1", "teacher.in_loss=1", "teacher.top_k=4"],
            0.5 + 2,
        ),
        (["algorithm.corrections=[{kind: reject, measure: second_moment, high: 0.1}]"], 0.5 + 2),
        (["algorithm.advantage=optimal_token_baseline"], 0.5 + 1),
        (["trainer.objective=sft"], 0),
        (["trainer.objective=dpo"], 2),
        (["trainer.objective=dpo", "preference.reference_free=true"], 1),
        (["trainer.objective=reward_model"], 1),
    ],
)
def test_passes_before_updates_by_algorithm(tmp_path: Path, overrides: list[str], passes: float) -> None:
    (tmp_path / "config.yaml").write_text(
        "{model: {hf_path: x}, data: {train: x}, "
        "trainer: {prompts_per_step: 8, prompts_per_update: 4, update_epochs: 2}}"
    )
    config = load_config(str(tmp_path / "config.yaml"), overrides)
    assert passes_before_updates(config, batch_arithmetic(config, TrainLayout(1))) == pytest.approx(passes)


def test_output_projection_of_sampling_masks_counts_mask_and_sets(deepseek: Config) -> None:
    arguments = model_arguments(policy_config(ModelRole.policy(deepseek.actor, deepseek.model))[0])
    section = ActorConfig(tokens_per_microbatch=4096, logprob_chunk_tokens=512)
    run = Execution(section, TrainLayout(2, tp=2), 2, fused=False, cuda=True, imbalance=1.0, square_length=1)
    plain, masked = (_output_projection_bytes(arguments, replace(run, masked=masked), 3) for masked in (False, True))
    logits, hidden = 512 * 129_280 // 2, 7168
    # 129,280 tokens: 4,040 words of bits and one that marks them. As many ids take 8 bytes each, and all tokens a bit.
    sets = 4096 * (8 * 4041 + 129_280 // 8 + 2 * 16 * 20)
    assert masked - plain == 1.5 * logits + (2 + 4) * logits + 4096 * hidden * 2 + sets


@pytest.mark.parametrize(("chunk", "converted"), [(1024, 32_768), (16_384, 16_384), (256, 129_280 // 2)])
def test_output_projection_of_float32_head_counts_converted_operand(
    chunk: int, converted: int, deepseek: Config
) -> None:
    """A tile has 2**25 logits: the weights of its entries, or its hidden states, are converted."""
    arguments = model_arguments(policy_config(ModelRole.policy(deepseek.actor, deepseek.model))[0])
    section = ActorConfig(tokens_per_microbatch=32_768, logprob_chunk_tokens=chunk)
    run = Execution(section, TrainLayout(2, tp=2), 2, fused=False, cuda=True, imbalance=1.0, square_length=1)

    def extra(run: Execution) -> float:
        exact = replace(run, float32_head=True)
        return _output_projection_bytes(arguments, exact, 1) - _output_projection_bytes(arguments, run, 1)

    assert extra(run) == converted * 7168 * 4
    assert extra(replace(run, element_bytes=4)) == extra(replace(run, cuda=False)) == 0
