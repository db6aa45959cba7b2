"""Suites of tests/distributed with models built from simulated TransformerEngine layers, as on a GPU.

MCORE_RL_EVERY_TEST=1 runs all suites, with each TransformerEngine version. To run one by hand:
`MCORE_RL_TE=1 python -m pytest tests/distributed`.
"""

from __future__ import annotations

import re

import pytest

from tests.distributed.launch import SIMULATION
from tests.te.processes import NEEDS_TE, run_python
from tests.te.simulation import CHOICE, PACKAGES, VERSION

pytestmark = [pytest.mark.slow, NEEDS_TE]

SUITES: dict[str, list[str]] = {
    "layouts": ["invariance"],
    "kinds of training": ["recompute", "router_replay"],
    "other losses and heads": ["critic", "router_losses", "reward_model"],
    "memory": ["host_optimizer", "offload"],
    "the rest": [
        *("actor_gradients", "actor_update", "checkpoint_integrity", "correction_bias", "expert_rounding", "logprobs"),
        *("lora_run", "microbatches", "model_parity", "mtp_training", "resharding", "special_losses"),
    ],
}
"""Modules of tests/distributed."""
USUAL = ("kinds of training",)


CASES = [
    pytest.param(suite, version, marks=[pytest.mark.on_demand] * (suite not in USUAL or version != VERSION))
    for suite in SUITES
    for version in PACKAGES
]


@pytest.mark.parametrize(("suite", "version"), CASES)
@pytest.mark.timeout(3600)
def test_a_suite_of_the_ranks_passes(suite: str, version: str) -> None:
    modules = [f"tests/distributed/test_{module}.py" for module in SUITES[suite]]
    variables = {SIMULATION: "1", CHOICE: version}
    said = run_python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *modules, **variables)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said[-1000:]
    assert int(passed.group(1)) > 0
