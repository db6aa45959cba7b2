"""Weight table of LoRA adapters under PEFT's names, derived from the model's table.

Every projection W, which consists of one or several fused HF modules, gets the matrices A and B; its adapted weight is
W + scale * B A.

| W | A | B |
|---|---|---|
| divided along its rows (column-parallel) | the modules' A [r, N] stacked, on every rank | rows divided like W |
| divided along its columns (row-parallel) | columns divided like W | whole, on every rank |
| not divided | the modules' A stacked | rows like W |

Some modules of a fused projection may have no adapter: their rows of B are padding.
Example, q and v of one group with two heads, r = 1, h inputs: A [2, h] is (A_q; A_v), B [4, 1] is (q0 q1 . v0).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.separate import trainer_rows
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import Same, Stacked, Subset

A, B = ".adapter.a", ".adapter.b"
"""Suffixes of the adapter's two matrices, appended to a projection's mcore name."""
PREFIX = "base_model.model."
"""Prefix of module names in PEFT checkpoints."""
_WEIGHT = ".weight"
_REASONS = {
    "indexer": "choices of an indexer have no gradient, so an adapter would never change",
    "embedding": "embeddings are not matrix products, and the loss reads the weight of the output projection directly",
    "router": "routers are not linear layers, here and in PEFT",
    "gate": "the gate of the shared expert is a parameter of its MLP in megatron, not a linear layer",
    "expert": "only routed experts have it, and their grouped GEMMs do not support adapters",
}


def module_of(hf_name: str) -> str:
    """Return the module of a weight: model.layers.0.self_attn.q_proj.weight -> model.layers.0.self_attn.q_proj."""
    return hf_name.removesuffix(_WEIGHT)


def leaf(hf_name: str) -> str:
    """Return the last component of a weight's module: model.layers.0.self_attn.q_proj.weight -> q_proj."""
    return module_of(hf_name).rpartition(".")[2]


def default_targets(rows: Sequence[Row]) -> list[str]:
    """Return the names of all modules that can have an adapter, in table order."""
    return list(dict.fromkeys(leaf(name) for row in rows if _refusal(row) == "" for name in row.hf))


def adapter_rows(
    rows: Sequence[Row], targets: Collection[str], rank: int, layout: TrainLayout | None = None
) -> list[Row]:
    """Return the rows of rank-`rank` adapters for all modules whose last name component is in `targets`.

    rows: the family's table. Empty `targets` select every module that can have an adapter. layout: with hf_tensors its
    ranks hold separate HF tensors (mapping.separate), and every module is a projection of its own.

    Raises: ConversionError for a target that the model lacks or that cannot have an adapter.
    """
    # A target is the last component of a name, so it selects the modules of all layers.
    chosen = set(targets or default_targets(rows))
    known = default_targets(rows)
    for target in sorted(chosen - set(known)):
        reasons = {_refusal(row) for row in rows if row.hf and target in map(leaf, row.hf)}
        reason = next(iter(sorted(reasons)), "") or "the model has no such module"
        raise ConversionError(f"{target}: {reason}; choose from {', '.join(known)}")
    found = []
    # Refusals depend on Megatron's names, so the rows are separated after them.
    for row in (row for row in rows if not _refusal(row)):
        for held in [row] if layout is None else trainer_rows([row], layout):
            parts = tuple(part for part, name in enumerate(held.hf) if leaf(name) in chosen)
            if parts:
                found += _factors(held, parts, rank)
    return found


def shared_with_experts(rows: Sequence[Row], targets: Collection[str]) -> list[str]:
    """Return the `targets` that routed experts have as well.

    PEFT (0.21, with transformers 5) applies such a target, also if it is a full module name, to the fused matrices of
    the experts, and does not load the adapters of other modules with this name.
    """
    experts = {leaf(name) for row in rows if row.num_experts for name in row.hf}
    return [target for target in targets if target in experts]


def _refusal(row: Row) -> str:
    """Return the reason why a row's modules cannot have an adapter; "" if they can."""
    if row.place != "layer":
        return _REASONS["embedding"] if row.place in ("embedding", "head") else "it is a multi-token-prediction module"
    if row.mcore.endswith(".gate_weight"):
        return _REASONS["gate"]
    if len(row.shapes[0]) != 2 or not row.mcore.endswith(_WEIGHT):
        return _REASONS["expert"] if row.num_experts else "it is not a matrix"
    if ".indexer." in row.mcore:
        return _REASONS["indexer"]
    if ".router." in row.mcore:
        return _REASONS["router"]
    return _REASONS["expert"] if row.num_experts else ""


def _factors(row: Row, parts: tuple[int, ...], rank: int) -> list[Row]:
    modules = [module_of(row.hf[part]) for part in parts]
    shapes = [row.shapes[part] for part in parts]
    name = row.mcore.removesuffix(_WEIGHT)
    names = {side: tuple(f"{PREFIX}{module}.lora_{side}.weight" for module in modules) for side in "AB"}
    factor = replace(row, fp8=False, redundant=(), stored=())
    a = replace(factor, mcore=name + A, hf=names["A"], shapes=tuple((rank, columns) for _, columns in shapes))
    b = replace(factor, mcore=name + B, hf=names["B"], shapes=tuple((rows, rank) for rows, _ in shapes))
    # Row-parallel: A is divided along its columns like W, and B is whole on every rank.
    if row.axis != "none" and row.dim == 1:
        return [a, replace(b, transform=Same(), axis="none", dim=0)]
    # Column-parallel or not divided: B follows the rows of W. Modules without adapter leave padding in B.
    if len(parts) < len(row.hf):
        b = replace(b, transform=Subset(row.transform, tuple((rows, rank) for rows, _ in row.shapes), parts))
    return [replace(a, transform=Stacked(len(parts)), axis="none", dim=0), b]
