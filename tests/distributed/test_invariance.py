"""The same update in every layout: starting from one distributed checkpoint, the loss, the log-probabilities and
entropies of all tokens, the gradients, and the parameters after two optimizer steps equal those of one rank.

Layouts: on 1 and 2 ranks all that the model supports; on 4, for one model with experts, a choice that combines every
two axes; on 8 one layout that uses every axis. MCORE_RL_EVERY_TEST=1 runs all layouts on 4 ranks and a choice on 8
ranks for each model. With simulated TransformerEngine, without that variable: the layouts in which its layers differ,
tensor parallelism and whole experts, on 2 ranks.

test_actor_gradients compares with transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.types import merge_metrics
from tests.distributed import policy_batch
from tests.distributed.invariance import ONE_MICROBATCH, Case, layouts, measure
from tests.distributed.launch import SIMULATED, launch
from tests.selection import EVERY_TEST
from tests.tiny_models import GROUPS, YARN, add_mtp_layer, tiny_fields, write_tiny_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "moe": ("qwen3_moe", {}),
    "v3": ("deepseek_v3", {"rope_parameters": YARN, **GROUPS}),
    "v3 mtp": ("deepseek_v3", {"rope_parameters": YARN, **GROUPS}),
}
# Relative to the tensor's largest entry; float32 sums in a different order. A factor of an axis, a lost or doubled
# token or a missing reduction is off by 1e-2 or more.
GRADIENT_TOLERANCE = 1e-5
VALUE_TOLERANCE = 2e-5  # nats
WEIGHT_TOLERANCE = 4e-6  # weights are of size 1 and move by about 1e-3
# Autograd hooks of Megatron's DDP keep actors alive, each with process groups that have about 50 threads.
CASES_PER_LAUNCH = 12


def cover(choices: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """Select a few layouts that combine every two axes that are combined in any of them."""

    def pairs(layout: dict[str, int]) -> set[Any]:
        divided = sorted(axis for axis, size in layout.items() if size > 1)
        return set(itertools.combinations(divided, 2)) | {(axis,) for axis in divided}

    wanted = set().union(*(pairs(layout) for layout in choices))
    chosen: list[dict[str, int]] = []
    while wanted:
        best = max(choices, key=lambda layout: len(pairs(layout) & wanted))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


# Settings that change the update, equally in every layout.
ROUTED = {"moe.load_balancing": "seq_aux_loss", "moe.aux_loss_coefficient": 0.02, "moe.z_loss_coefficient": 1e-3}
MATH: list[tuple[str, dict[str, Any]]] = [
    ("moe", ROUTED),
    ("moe", {"moe.router_replay": "policy"}),
    ("v3", {"moe.bias_update_rate": 1e-2}),
    ("v3 mtp", {"mtp_loss_coefficient": 0.3}),
]
# Settings that must not change the update.
MEANS: list[tuple[str, dict[str, Any]]] = [
    ("moe", {"recompute": "full"}),
    ("v3", {"recompute": "selective"}),
    ("moe", {"distributed_optimizer": False}),
    ("moe", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
]


USUAL = {4: ("v3",), 8: ("v3",)}
"""Models with experts and latent attention; test_actor_gradients runs others on 4 ranks."""
FEW: dict[int, list[dict[str, int]]] = {1: [{}], 2: [{"tp": 2}]}
"""Layouts in which the settings of MATH and MEANS are tested."""
if EVERY_TEST:
    FEW = {1: [{}], 2: [{"tp": 2}, {"pp": 2, "vpp": 2}], 4: [{"ep": 2, "cp": 2}]}


def _cases(num_ranks: int) -> list[Case]:
    cases = []
    for model in ("dense", "moe", "v3") if num_ranks < 4 or EVERY_TEST else USUAL[num_ranks]:
        kind, changes = MODELS[model]
        every = layouts(num_ranks, tiny_fields(kind, **changes))
        all_of_them = num_ranks < 4 or (num_ranks == 4 and EVERY_TEST)
        cases += [Case(model, layout) for layout in (every if all_of_them else cover(every))]
    if num_ranks == 2:
        cases += [Case(model, tokens=ONE_MICROBATCH) for model in ("dense", "moe", "v3")]
    for layout in FEW.get(num_ranks, []):
        cases += [Case(model, layout, math=math) for model, math in MATH]
        cases += [Case(model, layout, means=means) for model, means in MEANS if layout.get("pp") is None]
    if SIMULATED and not EVERY_TEST:
        cases = [case for case in cases if num_ranks == 2 and case.parallel.keys() <= {"tp", "ep", "etp"}]
    return cases


CASES: dict[int, list[Case]] = {num_ranks: _cases(num_ranks) for num_ranks in (1, 2, 4, 8)}
ALL_CASES = [
    pytest.param(size, index, id=str(case)) for size, cases in CASES.items() for index, case in enumerate(cases)
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name, (kind, changes) in MODELS.items():
        write_tiny_model(root / name, kind, **changes)
    add_mtp_layer(root / "v3 mtp")
    return {name: str(root / name) for name in MODELS}


@pytest.fixture(scope="module")
def checkpoints(directories: dict[str, str]) -> dict[str, str]:
    """Write one distributed checkpoint of each model in the trivial layout."""
    from model_converters.__main__ import main

    for directory in directories.values():
        assert main(["to-mcore", "--hf", directory, "--out", f"{directory}.mcore", "--logits", "never"]) == 0
    return {name: f"{directory}.mcore" for name, directory in directories.items()}


@pytest.fixture(scope="module")
def references(directories: dict[str, str], checkpoints: dict[str, str]) -> dict[str, dict[str, Any]]:
    every = [case for cases in CASES.values() for case in cases]
    cases = {case.reference: Case(case.model, tokens=ONE_MICROBATCH, math=case.math) for case in every}
    ranks = launch(measure, 1, directories, checkpoints, list(cases.values()), timeout_seconds=300)
    return {name: _join([rank[index] for rank in ranks]) for index, name in enumerate(cases)}


@dataclass
class Results:
    """Runs the cases, a few at a time, when a result of one of them is first requested."""

    directories: dict[str, str]
    checkpoints: dict[str, str]
    found: dict[tuple[int, int], dict[str, Any] | AssertionError] = field(default_factory=dict)

    def get(self, size: int, index: int) -> dict[str, Any]:
        if (size, index) not in self.found:
            first = index - index % CASES_PER_LAUNCH
            self._run(size, range(first, min(first + CASES_PER_LAUNCH, len(CASES[size]))))
        found = self.found[size, index]
        if isinstance(found, AssertionError):
            raise found
        return found

    def _run(self, size: int, indices: range) -> None:
        cases = [CASES[size][index] for index in indices]
        try:
            ranks = launch(measure, size, self.directories, self.checkpoints, cases, timeout_seconds=300)
        except AssertionError as error:  # each test of the launch fails immediately
            self.found |= {(size, index): error for index in indices}
            return
        self.found |= {(size, index): _join([rank[i] for rank in ranks]) for i, index in enumerate(indices)}


@pytest.fixture(scope="module")
def results(directories: dict[str, str], checkpoints: dict[str, str]) -> Results:
    return Results(directories, checkpoints)


def _join(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    values: dict[int, np.ndarray] = {}
    for sample, (held, *both) in (item for rank in ranks for item in rank["values"].items()):
        whole = values.setdefault(sample, np.full((2, len(held)), np.nan, np.float32))
        assert np.isnan(whole[:, held]).all(), f"a token of sample {sample} is on two ranks"
        whole[:, held] = both
    return {
        "loss": sum(rank["loss"] for rank in ranks),
        "values": values,
        "gradients": policy_batch.assemble([rank["gradients"] for rank in ranks]),
        "weights": policy_batch.assemble([rank["weights"] for rank in ranks]),
        "norms": {name: metric.value for name, metric in merge_metrics([rank["norms"] for rank in ranks]).items()},
    }


@pytest.mark.parametrize(("size", "index"), ALL_CASES)
def test_update_in_every_layout_equals_one_rank(size: int, index: int, results: Results, references: Any) -> None:
    found, expected = results.get(size, index), references[CASES[size][index].reference]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["values"].keys() == expected["values"].keys() == set(range(len(policy_batch.PROMPTS)))
    for sample, both in expected["values"].items():
        ours = found["values"][sample]
        assert np.abs(ours - both).max() <= VALUE_TOLERANCE, f"logp, entropy of sample {sample}: {ours} and not {both}"
    scale = {name: float(tensor.abs().max()) or 1.0 for name, tensor in expected["gradients"].items()}
    if found["gradients"]:
        _compare(found["gradients"], expected["gradients"], GRADIENT_TOLERANCE, scale)
    _compare(found["weights"], expected["weights"], WEIGHT_TOLERANCE, dict.fromkeys(expected["weights"], 1.0))
    # Norms by kind of module, before clipping; their squares add up to the square of Megatron's total norm.
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    kinds = dict(found["norms"])
    whole = kinds.pop("actor/grad_norm")
    assert sum(norm**2 for norm in kinds.values()) == pytest.approx(whole**2, rel=1e-4)


def _compare(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, scale: dict[str, float]
) -> None:
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - tensor).abs().max()) / scale[name] for name, tensor in expected.items()}
    # NaN marks an element that no rank holds; it must fail the comparison.
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"{len(wrong)} of {len(errors)}, the worst {max(wrong.items(), key=lambda item: item[1])}"
