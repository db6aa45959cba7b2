"""Every file in configs/ loads, its model and layout fit together, and it matches its sources."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rl.config import Config, load_config
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.validation import read_hf_config, validate
from mcore_rl.resolved.layout import model_arguments, role_layout
from model_converters.families import family_for
from model_converters.families.parts.mtp import without_mtp
from model_converters.families.parts.rotary_scaling import Yarn

ROOT = Path(__file__).parents[3]
SGLANG = [f"sglang/{path.name}" for path in sorted((ROOT / "configs" / "sglang").glob("*.yaml"))]
"""Files that are merged into the recipe of the same name."""
RECIPES = [*sorted(path.name for path in (ROOT / "configs").glob("*.yaml")), *SGLANG]
LARGE = [name for name in RECIPES if not name.endswith("_cpu.yaml")]
ASYNC = {
    "deepseek_v3_async.yaml": "dapo_deepseek_v3_671b.yaml",
    "qwen3_235b_a22b_async.yaml": "qwen3_235b_a22b.yaml",
    "qwen3_30b_a3b_async.yaml": "qwen3_30b_a3b.yaml",
}
"""Recipe -> recipe from which its model, data and batch are taken."""

DEEPSEEK_ON_512 = {"tp": 1, "pp": 16, "ep": 32, "first_stage_layers": 3, "last_stage_layers": 2}
LAYOUTS = {
    "deepseek_v3_96_gpus.yaml": (96, {"tp": 8, "pp": 12, "ep": 8, "last_stage_layers": 6}),
    "deepseek_v3_128_gpus.yaml": (128, {"tp": 8, "pp": 16, "ep": 8}),
    "deepseek_v3_256_gpus.yaml": (256, {"tp": 8, "pp": 16, "ep": 8}),
    "deepseek_v3_512_gpus.yaml": (512, DEEPSEEK_ON_512),
}
PUBLISHED_PARAMETERS = {
    "DeepSeek-V3": 671.0e9,
    "GLM-4.5": 355e9,
    "GLM-4.7": 355e9,
    "Kimi-K2-Instruct": 1.03e12,
    "Qwen2.5-32B": 32.8e9,
    "Qwen3-235B-A22B": 235.1e9,
    "Qwen3-30B-A3B": 30.5e9,
    "Qwen3.5-35B-A3B": 35e9,
    "Qwen3.5-397B-A17B": 397e9,
    "gpt-oss-20b": 20.9e9,
}


def flat(text: str) -> dict[str, Any]:
    """Parse lines of one section each, `rollout: {tp: 32}`, to values by full key."""
    sections = yaml.safe_load(text)
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


VERL_671B = flat("""
model: {dtype: bfloat16}
data: {long_prompts: truncate_left}
rollout:
  {engine: vllm, tp: 32, gpu_memory_fraction: 0.6, max_batched_tokens: 10240, temperature: 1.0, top_p: 1.0, top_k: -1,
   validation_temperature: 1.0, validation_top_p: 0.7, validation_samples: 1, max_prompt_tokens: 2048,
   max_response_tokens: 8192, samples_per_prompt: 16}
algorithm: {advantage: grpo, loss_aggregation: token-mean, entropy_coefficient: 0.0}
algorithm.policy_loss: {name: ppo_clip, clip_low: 0.2, clip_high: 0.28, dual_clip: 10.0}
algorithm.dynamic_sampling: {enable: false}
reward.overlong: {enable: false, buffer_tokens: 4096, penalty: 0.1}
actor: {tokens_per_microbatch: 20480, mtp_loss_coefficient: 0.0}
actor.optimizer: {lr: 0.000001, weight_decay: 0.1, clip_grad: 1.0}
actor.offload: {params: true, grads: true, optimizer: true}
trainer:
  {steps: 10, prompts_per_step: 256, prompts_per_update: 32, validate_every_steps: 5, validate_before: false}
checkpoint: {every_steps: 5}
cluster: {nodes: 64, gpus_per_node: 8, gpu_memory_gib: 96, placement: colocated}
""")
ALL_FOUR_PARTS = flat("""
algorithm: {loss_aggregation: token-mean}
algorithm.policy_loss: {clip_low: 0.2, clip_high: 0.28}
algorithm.dynamic_sampling: {enable: true, metric: accuracy}
reward.overlong: {enable: true, buffer_tokens: 4096, penalty: 1.0}
reward: {correct: 1.0, incorrect: -1.0}
""")
VERL_GPT_OSS = flat("""
rollout:
  {tp: 2, gpu_memory_fraction: 0.7, max_prompt_tokens: 512, max_response_tokens: 8192, samples_per_prompt: 5,
   temperature: 1.0}
data: {long_prompts: drop, template_kwargs: {reasoning_effort: medium}}
algorithm: {advantage: grpo, loss_aggregation: token-mean, entropy_coefficient: 0.0}
algorithm.kl: {in_loss: 0.001, loss_kind: low_var}
actor.optimizer: {lr: 0.000001, weight_decay: 0.01, clip_grad: 1.0, schedule: constant}
trainer: {prompts_per_step: 256, prompts_per_update: 256, validate_every_steps: 10}
checkpoint: {every_steps: 50}
""")
# The longest response has 16,384 tokens, and 4,096 more that are punished.
PAPER_32B = ALL_FOUR_PARTS | flat("""
rollout:
  {samples_per_prompt: 16, max_response_tokens: 20480, temperature: 1.0, validation_samples: 32,
   validation_temperature: 1.0, validation_top_p: 0.7}
actor.optimizer: {lr: 0.000001, schedule: constant}
trainer: {prompts_per_step: 512}
""")


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def recipe(name: str) -> Config:
    files = [f"configs/{each}" for each in dict.fromkeys((Path(name).name, name))]
    # The demo creates its models, with experts except for fsdp2; GSM8K's files are given on the command line.
    model = "Qwen2.5-32B" if name == "demo_fsdp2_cpu.yaml" else "gsm8k_tiny"
    missing = {
        "demo": [f"model.hf_path=configs/models/{model}"],
        "gsm8k": ["data.train=train.jsonl"],
    }
    return load_config(files, missing.get(name.partition("_")[0], []))


def texts(node: Any) -> list[str]:
    """Yield every text in a YAML tree."""
    if isinstance(node, dict):
        return [text for value in node.values() for text in texts(value)]
    return [text for value in node for text in texts(value)] if isinstance(node, list) else [str(node)]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_name_no_file_outside_the_repository(name: str) -> None:
    named = [Path(text) for text in texts(yaml.safe_load((ROOT / "configs" / name).read_text()))]
    assert [str(path) for path in named if path.is_absolute() or {"..", "~"} & set(path.parts)] == []


def values_of(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    found = {}
    for key in keys:
        node: Any = config
        for part in key.split("."):
            node = getattr(node, part)
        found[key] = node
    return found


def differences(config: Config, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the keys whose values differ."""
    return {key: value for key, value in values_of(config, expected).items() if value != expected[key]}


def updates_per_step(config: Config) -> int:
    return config.trainer.prompts_per_step // config.trainer.prompts_per_update


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid_and_layouts_fit(name: str) -> None:
    config = recipe(name)
    validate(config)
    role = ModelRole.policy(config.actor, config.model)
    layout = role_layout(role, config.num_trainer_ranks, read_hf_config(config.model))
    nodes, slots = config.cluster.nodes, config.cluster.gpus_per_node
    apart = config.rollout.num_engines * config.rollout.tp if config.cluster.placement == "disaggregated" else 0
    assert layout.world_size + apart == nodes * slots
    assert (ROOT / "configs" / name).read_text().startswith("# ")


@pytest.mark.parametrize("name", LARGE)
def test_large_recipes_use_all_gpus_and_fit_longest_sequence(name: str) -> None:
    config = recipe(name)
    nodes = config.rollout.nodes or config.cluster.nodes
    assert config.rollout.num_engines * config.rollout.tp == nodes * config.cluster.gpus_per_node
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert config.actor.tokens_per_microbatch >= longest
    assert config.model.dtype == "bfloat16"
    assert config.cluster.device == "cuda"


@pytest.mark.parametrize("model", PUBLISHED_PARAMETERS)
def test_recipe_models_have_published_sizes(model: str) -> None:
    hf_config = json.loads(Path(f"configs/models/{model}/config.json").read_text())
    assert "quantization_config" not in hf_config
    hf_config = without_mtp(hf_config)
    rows = family_for(hf_config).rows(hf_config)
    sizes = [sum(map(prod, row.shapes)) * (len(row.layers) or 1) * (row.num_experts or 1) for row in rows]
    assert sum(sizes) == pytest.approx(PUBLISHED_PARAMETERS[model], rel=0.01)


@pytest.mark.parametrize("name", LAYOUTS)
def test_deepseek_recipes_match_their_sources(name: str) -> None:
    ranks, parallel = LAYOUTS[name]
    config = recipe(name)
    assert config.num_trainer_ranks == ranks
    assert not differences(config, {f"actor.parallel.{key}": value for key, value in parallel.items()})


@pytest.mark.parametrize("name", ASYNC)
def test_async_recipes_differ_in_async_keys_only(name: str) -> None:
    config, sibling = recipe(name), recipe(ASYNC[name])
    assert 1 <= config.rollout.max_staleness <= config.rollout.hard_staleness == config.rollout.max_staleness_hard
    assert (config.algorithm.policy_loss.name, config.algorithm.policy_loss.prox) == ("decoupled_ppo", None)
    assert config.rollout.nodes > 0
    assert config.plan.network_gib_per_second is not None
    sections = ("model", "data", "reward", "algorithm", "trainer", "checkpoint")
    keys = [f"{section}.{key}" for section in sections for key in vars(getattr(config, section))]
    keys += [f"rollout.{key}" for key in vars(config.rollout)] + ["actor.optimizer", "actor.recompute"]
    values = values_of(config, keys)
    loss = replace(config.algorithm.policy_loss, name=sibling.algorithm.policy_loss.name)
    values["algorithm.policy_loss"] = loss
    values["actor.optimizer"] = replace(config.actor.optimizer, cpu_offload=sibling.actor.optimizer.cpu_offload)
    assert set(differences(sibling, values)) - {"rollout.num_engines"} == {
        *("rollout.nodes", "rollout.gpu_memory_fraction", "rollout.max_staleness", "rollout.max_staleness_hard"),
    }


def test_sglang_recipes_change_engine_keys_only() -> None:
    keys = {name: set(yaml.safe_load((ROOT / "configs" / name).read_text())["rollout"]) for name in SGLANG}
    assert keys == {
        "sglang/dapo_deepseek_v3_671b.yaml": {"engine", "expert_parallel"},
        "sglang/qwen3_235b_a22b.yaml": {"engine", "expert_parallel", "gpu_memory_fraction"},
    }
    for name in SGLANG:
        assert set(yaml.safe_load((ROOT / "configs" / name).read_text())) == {"run", "rollout"}
        rollout = recipe(name).rollout
        assert (rollout.engine, rollout.expert_parallel) == ("sglang", True)


def test_async_recipes_have_separate_engine_nodes() -> None:
    assert sorted(ASYNC) == [name for name in LARGE if recipe(name).rollout.max_staleness]
    assert sorted(ASYNC) == [name for name in RECIPES if name.endswith("_async.yaml")]


def test_dapo_671b_recipe_matches_verl_script() -> None:
    config = recipe("dapo_deepseek_v3_671b.yaml")
    assert not differences(config, VERL_671B)
    assert not differences(config, {f"actor.parallel.{key}": value for key, value in DEEPSEEK_ON_512.items()})
    assert config.actor.optimizer.warmup_steps == 10 * updates_per_step(config) == 80


def test_gpt_oss_recipe_matches_verl_script_and_release() -> None:
    """The release has windows of 128 tokens in every second layer, beginning with the first, and YaRN's factor 32."""
    config = recipe("gpt_oss_20b.yaml")
    assert not differences(config, VERL_GPT_OSS)
    arguments = model_arguments(read_hf_config(config.model))
    sizes, rotary = arguments.transformer, arguments.rotary
    assert (sizes["window_size"], sizes["window_attn_skip_freq"]) == ((127, 0), [1, 0] * 12)
    assert (sizes["softmax_type"], sizes["activation_func_clamp_value"]) == ("learnable", 7.0)
    assert isinstance(rotary.scaling, Yarn)
    assert (rotary.base, rotary.scaling.factor) == (150000, 32)
    assert rotary.factor == pytest.approx(0.1 * math.log(32) + 1)


def test_full_671b_recipe_differs_in_two_parts() -> None:
    full = recipe("dapo_full_deepseek_v3_671b.yaml")
    changed = differences(full, VERL_671B)
    assert set(changed) == {
        "algorithm.dynamic_sampling.enable",
        "reward.overlong.enable",
        "reward.overlong.penalty",
        "trainer.steps",
    }
    assert not differences(full, ALL_FOUR_PARTS)


def test_dapo_32b_recipe_matches_the_paper() -> None:
    config = recipe("dapo_qwen2_5_32b.yaml")
    assert not differences(config, PAPER_32B)
    assert config.trainer.prompts_per_update * config.rollout.samples_per_prompt == 512
    assert updates_per_step(config) == 16
    assert config.actor.optimizer.warmup_steps == 20 * updates_per_step(config) == 320


def test_dapo_32b_recipe_with_fsdp2_differs_in_sharding_only() -> None:
    fsdp2, paper = ((ROOT / "configs" / f"dapo_qwen2_5_32b{name}.yaml").read_text() for name in ("_fsdp2", ""))
    kept = yaml.safe_load(paper)
    kept["run"]["dir"] += "_fsdp2"
    del kept["actor"]["parallel"], kept["actor"]["offload"]["grads"]
    kept["actor"]["strategy"] = "fsdp2"
    assert yaml.safe_load(fsdp2) == kept
