"""The same update in every layout: starting from one distributed checkpoint, the loss, the log-probabilities and
entropies of all tokens, the gradients, and the parameters after two optimizer steps equal those of one rank.

The model has experts and latent attention; one layout of a second model has sinks, windows and biases of experts, whose
gradients megatron-core sums or counts twice, and one of a third has two rotations and context parallelism. Layouts: on
2 ranks data parallelism alone, and a choice that uses every axis; on 8 one layout that uses every axis; on 2 and 4 one
with sharded parameters. MCORE_RL_EVERY_TEST=1 runs all layouts on up to 4 ranks, also with sharded parameters, and a
choice on 8 ranks. With simulated TransformerEngine, without that variable: the layouts in which its layers differ,
tensor parallelism and whole experts, on 2 ranks.

test_actor_gradients compares with transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.types import merge_metrics
from tests.distributed import converting, policy_batch
from tests.distributed.invariance import ONE_MICROBATCH, Case, layouts, measure
from tests.distributed.launch import SIMULATED, launch
from tests.selection import EVERY_TEST
from tests.tiny_models import GROUPS, YARN, tiny_fields, write_tiny_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "moe": ("qwen3_moe", {}),
    "linear attention": ("qwen3_next", {}),
    "qwen3.5": ("qwen3_5_moe_text", {}),
    "v3": ("deepseek_v3", {"rope_parameters": YARN, **GROUPS}),
    "minimax": ("minimax_m2", {}),
    "ernie": ("ernie4_5_moe", {}),
    "oss": ("gpt_oss", {}),
    "gemma": ("gemma3_text", {}),
    "indexer": ("glm_moe_dsa", {}),
}
# Norms over all heads: every rank has a part of the weight, of whose gradient no other rank has a share.
DIVIDED_NORMS: dict[int, list[Case]] = {
    2: [Case("minimax", {"tp": 2})],
    4: [Case("minimax", {"tp": 2, "shard_parameters": True})],
}
USUAL = ("v3",)
# Relative to the tensor's largest entry; float32 sums in a different order. A factor of an axis, a lost or doubled
# token or a missing reduction is off by 1e-2 or more.
GRADIENT_TOLERANCE = 1e-5
VALUE_TOLERANCE = 2e-5  # nats
WEIGHT_TOLERANCE = 4e-6  # weights are of size 1 and move by about 1e-3
# Autograd hooks of Megatron's DDP keep actors alive, each with process groups that have about 50 threads.
CASES_PER_LAUNCH = 12
SHARDED = {"shard_parameters": True}
USUALLY_SHARDED: dict[int, tuple[dict[str, int], ...]] = {2: ({"ep": 2},), 4: ({"tp": 2, "ep": 2},)}


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


def _cases(num_ranks: int) -> list[Case]:
    cases = []
    # Usually, the layout on 8 ranks combines what the layouts on 4 combine in pairs.
    for model in MODELS if EVERY_TEST else USUAL if num_ranks != 4 else ():
        kind, changes = MODELS[model]
        every = layouts(num_ranks, tiny_fields(kind, **changes))
        all_of_them = num_ranks <= 4 and (EVERY_TEST or SIMULATED)
        chosen = every if all_of_them else cover(every)
        if num_ranks == 2 and not all_of_them:
            chosen.append(every[0])  # data parallelism alone
        cases += [Case(model, layout) for layout in chosen]
        if num_ranks == 2:
            cases.append(Case(model, tokens=ONE_MICROBATCH))
    if num_ranks == 2 and not EVERY_TEST:
        cases += [Case("oss", {"tp": 2, "ep": 2}), Case("gemma", {"cp": 2})]
    if SIMULATED and not EVERY_TEST:
        cases = [case for case in cases if num_ranks == 2 and case.parallel.keys() <= {"tp", "ep", "etp"}]
    cases += [case for case in DIVIDED_NORMS.get(num_ranks, []) if case not in cases and not SIMULATED]
    return cases + [Case(model, layout | SHARDED) for model, layout in _sharded(num_ranks)]


def _sharded(num_ranks: int) -> list[tuple[str, dict[str, int]]]:
    """Choose layouts in which parameters are sharded."""
    if EVERY_TEST and num_ranks <= 4:
        # Frozen parameters of indexers are not sharded.
        fields = {name: tiny_fields(kind, **changes) for name, (kind, changes) in MODELS.items()}
        every = [(name, layout) for name, hf in fields.items() for layout in layouts(num_ranks, hf)]
        return [(name, layout) for name, layout in every if "pp" not in layout and name != "indexer"]
    return [("v3", layout) for layout in USUALLY_SHARDED.get(num_ranks, ())] if not SIMULATED else []


CASES: dict[int, list[Case]] = {num_ranks: _cases(num_ranks) for num_ranks in (2, 4, 8)}
ALL_CASES = [pytest.param(size, case, id=str(case)) for size, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> dict[int, list[Case]]:
    """The cases that this call of pytest runs, by number of ranks: `-k` selects a model or a layout."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    params = [item.callspec.params for item in items]
    return {size: [each["case"] for each in params if each["size"] == size] for size in CASES}


@pytest.fixture(scope="module")
def directories(selected: dict[int, list[Case]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    chosen = {case.model for cases in selected.values() for case in cases}
    return {name: str(write_tiny_model(root / name, MODELS[name][0], **MODELS[name][1])) for name in chosen}


@pytest.fixture(scope="module")
def checkpoints(directories: dict[str, str]) -> dict[str, str]:
    """Write one distributed checkpoint of each model in the trivial layout."""
    for directory in directories.values():
        converting.to_mcore(Path(directory), Path(f"{directory}.mcore"), {"world_size": 1})
    return {name: f"{directory}.mcore" for name, directory in directories.items()}


@pytest.fixture(scope="module")
def references(directories: dict[str, str], checkpoints: dict[str, str]) -> dict[str, dict[str, Any]]:
    cases = [Case(model, tokens=ONE_MICROBATCH) for model in directories]
    (found,) = launch(measure, 1, directories, checkpoints, cases)
    return {case.model: _join([result]) for case, result in zip(cases, found, strict=True)}


@pytest.fixture(scope="module")
def results(
    selected: dict[int, list[Case]], directories: dict[str, str], checkpoints: dict[str, str]
) -> dict[tuple[int, str], dict[str, Any]]:
    """Results by number of ranks and name of the case."""
    found = {}
    for size, cases in selected.items():
        for first in range(0, len(cases), CASES_PER_LAUNCH):
            chosen = cases[first : first + CASES_PER_LAUNCH]
            ranks = launch(measure, size, directories, checkpoints, chosen)
            found |= {(size, str(case)): _join([rank[i] for rank in ranks]) for i, case in enumerate(chosen)}
    return found


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


@pytest.mark.parametrize(("size", "case"), ALL_CASES)
def test_update_in_every_layout_equals_one_rank(size: int, case: Case, results: Any, references: Any) -> None:
    found, expected = results[size, str(case)], references[case.model]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["values"].keys() == expected["values"].keys() == set(range(len(policy_batch.PROMPTS)))
    for sample, both in expected["values"].items():
        ours = found["values"][sample]
        assert np.abs(ours - both).max() <= VALUE_TOLERANCE, f"logp, entropy of sample {sample}: {ours} and not {both}"
    scale = {name: float(tensor.abs().max()) or 1.0 for name, tensor in expected["gradients"].items()}
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
