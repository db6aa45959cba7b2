"""Imported scripts with published models: `plan` accepts each, or rejects it with keys to change."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl.config import load_config
from mcore_rl.config.document import commented_yaml
from mcore_rl.config.reading.unknown_keys import known_keys
from mcore_rl.errors import ConfigError
from mcore_rl.migration.slime.reader import read_slime
from mcore_rl.migration.slime.translation import translate as translate_slime
from mcore_rl.migration.verl.reader import read_verl
from mcore_rl.migration.verl.translation import translate as translate_verl
from mcore_rl.planner.plan import make_plan
from tests.selection import on_demand_unless

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
DENSE, MOE = "Qwen2.5-32B", "Qwen3-30B-A3B"
ARGUMENTS = {"1": "8", "2": "out", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "NNODES": "2"}
MODELS = {
    "dapo_32b.sh": DENSE,
    "dapo_30b_megatron.sh": MOE,
    "grpo_gsm8k.sh": DENSE,
    "ppo_critic.sh": DENSE,
    "deepseek_671b.sh": "DeepSeek-V3",
    "fully_async.sh": MOE,
    "one_step_off.sh": MOE,
    "tools.sh": DENSE,
    "sft.sh": DENSE,
    "gspo_sbatch.sh": MOE,
    "trainer.yaml": DENSE,
    "skypilot.yaml": DENSE,
    "slime_grpo.sh": MOE,
    "slime_async_ppo.sh": DENSE,
}
ON_DEMAND = ("dapo_30b_megatron.sh", "one_step_off.sh", "deepseek_671b.sh")
"""Scripts whose plans take seconds: other scripts have Megatron's layouts of experts, and asynchronous steps.
tests/distributed/test_plan.py plans DeepSeek-V3."""


def test_plan_of_supervised_import_has_no_engines(tmp_path: Path) -> None:
    _, draft, _ = translate_verl(read_verl(SCRIPTS / "sft.sh", ARGUMENTS).settings)
    path = tmp_path / "config.yaml"
    path.write_text(commented_yaml(draft.values, draft.origins, "sft"))
    overrides = [f"model.hf_path={ROOT / 'configs' / 'models' / DENSE}", "cluster.gpu_memory_gib=80"]
    few, many = (
        make_plan(load_config(path, [*overrides, f"rollout.gpu_memory_fraction={fraction}"], needs_data=False))
        for fraction in (0.01, 0.9)
    )
    assert few.fullest.phases == many.fullest.phases
    assert few.verdict.errors == many.verdict.errors


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_demand_unless(name not in ON_DEMAND)) for name in MODELS])
def test_import_with_published_model_is_planned(name: str, tmp_path: Path) -> None:
    if name.startswith("slime"):
        _, draft, _ = translate_slime(read_slime(SCRIPTS / name, {}).settings)
    else:
        _, draft, _ = translate_verl(read_verl(SCRIPTS / name, ARGUMENTS).settings)
    path = tmp_path / "config.yaml"
    path.write_text(commented_yaml(draft.values, draft.origins, name))
    model = ROOT / "configs" / "models" / MODELS[name]
    overrides = [f"model.hf_path={model}", *(f"{key}={model}" for key in ("critic.hf_path",) if key in draft.values)]
    try:
        errors = list(make_plan(load_config(path, overrides, needs_data=False)).verdict.errors)
    except ConfigError as error:
        errors = [str(error)]
    assert [error for error in errors if not any(key in error for key in known_keys())] == []
