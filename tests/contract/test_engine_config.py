"""Engines compute the same as transformers even if config.json has fields that only engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.types import GenerationRequest, SamplingOptions
from model_converters.families import FAMILIES
from tests.contract.engines import LATENT, FamilyEngine, families_of_engines
from tests.engine_fields import OTHER_VALUES
from tests.tiny_models import VOCABULARY, YARN, reference_logits, tiny_model

PROMPT_TOKENS = 20
"""Longer than the attention windows of OTHER_VALUES."""
EVERY_FIELD = [(name, {}, {}) for name in FAMILIES]
GREEDY_GROUPS = {"n_group": 4, "topk_group": 2, "topk_method": "greedy", "n_routed_experts": 8}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *EVERY_FIELD,
    ("glm4_moe", {}, {"partial_rotary_factor": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("deepseek_v3", {}, {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0}}),
    ("deepseek_v3", {}, {"rope_parameters": YARN | {"beta_fast": None, "mscale": None, "mscale_all_dim": None}}),
    ("deepseek_v2", GREEDY_GROUPS, {}),
]
"""(family, fields of the model, fields that replace those in the config.json that transformers saves)."""


SGLANG_CASES = [case for case in EVERY_FIELD if case[0] in ("qwen2", "glm4_moe")]
"""Always tested with SGLang, whose restart imports it again; the others on demand."""


def saved(directory: Path, name: str, fields: dict[str, Any], replaced: dict[str, Any]) -> Path:
    family = FAMILIES[name]
    sizes = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    latent = LATENT if family.absent_for_engines else {}
    tiny_model(family.transformers_type or name, **(sizes | latent | fields)).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {"model_type": name} | replaced
    excluded = family.own_fields | family.absent_for_engines
    others = {key: value for key, value in OTHER_VALUES.items() if key not in excluded} if not replaced else {}
    (directory / "config.json").write_text(json.dumps(config | others))
    return directory


def reference_directory(directory: Path, name: str) -> Path:
    """Set the model_type under which transformers knows the model."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"model_type": FAMILIES[name].transformers_type or name})
    )
    return directory


@pytest.mark.parametrize(
    ("engines", "case"),
    families_of_engines(CASES, SGLANG_CASES),
    indirect=["engines"],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_engine_own_config_fields_do_not_change_logp(
    engines: FamilyEngine, case: tuple[str, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    name, fields, replaced = case
    if engines.kind == "sglang" and FAMILIES[name].absent_for_engines:
        pytest.skip("refused by config.rules.engine_support")
    engine = engines.start(saved(tmp_path, name, fields, replaced))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, size=PROMPT_TOKENS).astype(np.int32) for _ in range(3)]
    sampling = SamplingOptions(8, temperature=1.0)
    done = engine.generate([GenerationRequest(str(i), prompt, i, sampling) for i, prompt in enumerate(prompts)])
    whole = [[*prompt.tolist(), *done[str(i)].token_ids.tolist()] for i, prompt in enumerate(prompts)]
    logits = reference_logits(reference_directory(tmp_path, name), whole)
    for i, tokens in enumerate(whole):
        logp = logits[i][PROMPT_TOKENS - 1 : -1].double().log_softmax(-1)
        drawn = torch.tensor(tokens[PROMPT_TOKENS:])[:, None]
        np.testing.assert_allclose(done[str(i)].logp, logp.gather(1, drawn)[:, 0], atol=1e-4)
