"""Multi-token-prediction layers in vLLM: their drafts are transformers', also after weight updates, which include them.

test_drafts.py compares responses with and without their drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.types import GenerationRequest, SamplingOptions
from tests.contract.draft_models import LAYERS, PREFIX, CheckpointTrainer, DraftOracle, write_draft_model
from tests.contract.engines import RemoteEngine
from tests.selection import on_demand_unless
from tests.tiny_models import VOCABULARY

TOKENS, DRAFT_BELOW = 3, 4
TEMPERATURES = (0.0, 1.0, 0.5, 1.0, 0.0, 1.0)


class Session:
    """An engine that starts with random weights."""

    def __init__(self, engine: RemoteEngine, family: str, tp: int, root: Path) -> None:
        self.root = root
        self.checkpoints = [write_draft_model(root / str(seed), family, seed=seed) for seed in (1, 2)]
        self.engine = engine.start(
            self.checkpoints[0],
            load_weights=False,
            max_batched_tokens=16,
            max_concurrent_requests=16,
            tp=tp,
            draft="mtp",
            draft_tokens=TOKENS,
            draft_below=DRAFT_BELOW,
        )

    def oracle(self, checkpoint: int) -> DraftOracle:
        scratch = self.root / f"longer {checkpoint}"
        return DraftOracle(self.checkpoints[checkpoint], scratch)


CASES = {"glm4_moe": ("glm4_moe", 1), "deepseek_v3": ("deepseek_v3", 1), "glm4_moe tp2": ("glm4_moe", 2)}
"""Family of the model, and rollout.tp."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=on_demand_unless(name == "glm4_moe")) for name in CASES]
)
def session(
    request: pytest.FixtureRequest,
    process_of: Callable[[str], RemoteEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Session:
    return Session(process_of("vllm"), *CASES[request.param], tmp_path_factory.mktemp("models"))


def make_requests() -> list[GenerationRequest]:
    """Create requests that end one after the other. Prompts are longer than a pass."""
    rng = np.random.default_rng(1)
    return [
        GenerationRequest(
            str(i),
            rng.integers(2, VOCABULARY, size=19 + i).astype(np.int32),
            i,
            SamplingOptions(6 + 4 * i, temperature=temperature),
        )
        for i, temperature in enumerate(TEMPERATURES)
    ]


def drafts_of_steps(engine: Any) -> list[tuple[list[int], list[int]]]:
    """Step to the end of all requests. Returns tokens and draft of each request after each step."""
    found = []
    scheduler = engine._core.engine_core.scheduler
    while engine.num_running:
        engine.step()
        found += [(list(each.all_token_ids), list(each.spec_token_ids)) for each in scheduler.running]
    return found


def check_drafts(session: Session, checkpoint: int) -> tuple[int, int]:
    """Compare all drafts with the oracle's. Returns how many passes of decoding requests had no draft, and had one."""
    requests, oracle = make_requests(), session.oracle(checkpoint)
    session.engine.call("submit", requests)
    by_prompt = {tuple(each.token_ids): each for each in requests}
    num_passes = [0, 0]
    for tokens, draft in session.engine.call(drafts_of_steps):
        request = next(each for prompt, each in by_prompt.items() if tuple(tokens[: len(prompt)]) == prompt)
        if draft:
            assert draft == oracle.draft(tokens, TOKENS, request.seed, request.sampling.temperature)
        if len(tokens) > len(request.token_ids):
            num_passes[bool(draft)] += 1
    return num_passes[0], num_passes[1]


def test_drafts_after_each_update_are_those_of_transformers(session: Session) -> None:
    """Prompts in pieces, and drafts that begin after steps without them: the layer's KV cache is complete."""
    for version, checkpoint in enumerate((1, 0), start=1):
        trainer = CheckpointTrainer(session.checkpoints[checkpoint], session.engine, 1 << 20, 2)
        trainer.publish(version)
        without, drafts = check_drafts(session, checkpoint)
        assert without > 10
        assert drafts > 10
        assert trainer.certify() > 40


def _drafter(engine: Any) -> dict[str, torch.Tensor]:
    worker = engine._engine.model_executor.driver_worker.worker
    return dict(worker.model_runner.get_draft_model().named_parameters())


def _corrupt(engine: Any, name: str) -> None:
    _drafter(engine)[name].data.view(-1)[0] += 0.25


@pytest.mark.parametrize(
    ("parameter", "names"),
    [
        ("eh_proj.weight", ["eh_proj.weight"]),
        ("hnorm.weight", ["hnorm.weight"]),
        ("shared_head.norm.weight", ["shared_head.norm.weight"]),
        ("mtp_block.input_layernorm.weight", ["input_layernorm.weight"]),
        ("mtp_block.mlp.experts.routed_experts.w2_weight", ["mlp.experts.0.down_proj.weight"]),
    ],
)
def test_compare_one_wrong_element_of_a_draft_layer_is_named(
    session: Session, parameter: str, names: list[str]
) -> None:
    if session.engine.settings["rollout_config"].tp > 1:
        pytest.skip("ranks are other processes")
    trainer = CheckpointTrainer(session.checkpoints[0], session.engine, 1 << 20, 2)
    trainer.publish(5)
    session.engine.call(_corrupt, f"model.layers.{LAYERS}.{parameter}")
    with pytest.raises(WeightSyncError) as caught:
        trainer.certify()
    assert f"{len(names)} differ: {', '.join(PREFIX + name for name in names)}" in str(caught.value)
    trainer.publish(6)
    trainer.certify()
