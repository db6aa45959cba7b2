"""What people and scripts outside the code rely on, and the sizes and names that keep files readable."""

from __future__ import annotations

import ast
from pathlib import Path

from mcore_rl.config.reading.unknown_keys import known_keys

ROOT = Path(__file__).parents[2]
FOLDERS = ("mcore_rl", "model_converters", "scripts", "benchmarks", "tests")
MAX_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers", "helper"}

FROZEN_KEYS = """
run.dir run.seed
trainer.steps trainer.prompts_per_step trainer.prompts_per_update
rollout.samples_per_prompt rollout.engine rollout.tp rollout.temperature
rollout.max_prompt_tokens rollout.max_response_tokens
actor.parallel.tp actor.parallel.pp actor.parallel.vpp actor.parallel.ep actor.parallel.etp actor.parallel.cp
actor.parallel.first_stage_layers actor.parallel.last_stage_layers actor.tokens_per_microbatch
algorithm.advantage algorithm.policy_loss.name algorithm.loss_aggregation
algorithm.dynamic_sampling.enable algorithm.dynamic_sampling.max_batches
reward.function reward.overlong.enable reward.overlong.buffer_tokens reward.overlong.penalty
data.train data.val data.prompt_key model.hf_path checkpoint.every_steps
cluster.nodes cluster.gpus_per_node cluster.gpu_memory_gib cluster.placement
""".split()


def python_files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_frozen_configuration_keys_exist() -> None:
    assert set(FROZEN_KEYS) <= set(known_keys())


def test_files_are_short() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in python_files()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_functions_fit_a_screen() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_names_say_what_is_inside() -> None:
    assert [str(path) for path in python_files() if path.stem in VAGUE_NAMES or path.parent.name in VAGUE_NAMES] == []


def test_make_targets_exist() -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    assert {"setup", "demo", "test", "gpu", "lint", "type", "bench"} <= targets
