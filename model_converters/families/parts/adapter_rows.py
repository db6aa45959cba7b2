"""The weight table of a model's LoRA adapters, made of the model's own: every projection W, one or several HF modules
fused, gets A and B with W + scale * B A, as rows of PEFT's names.

| of W | A | B |
|---|---|---|
| divided along its rows (column-parallel) | the modules' A [r, N] stacked, on every rank | rows as W has them |
| divided along its columns (row-parallel) | columns as W has them | whole, on every rank |
| not divided | the modules' A stacked | rows as W has them |

Of a fused projection some modules may have an adapter and others none: B's rows of the others are padding.
Worked example, q and v of one group with two heads, r = 1, h inputs: A [2, h] is (A_q; A_v), B [4, 1] (q0 q1 . v0).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import Same, Stacked, Subset

A, B = ".adapter.a", ".adapter.b"
"""What follows a projection's mcore name in the names of its adapter's two matrices."""
PREFIX = "base_model.model."
"""Before a module's name in PEFT's names."""
_WEIGHT = ".weight"
_REASONS = {
    "embedding": "embeddings multiply with nothing, and the loss reads the output projection's weight itself",
    "router": "routers are no linear layers, neither here nor to PEFT",
    "expert": "only routed experts have it, and their grouped products have no place for adapters",
}


def module_of(hf_name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> model.layers.0.self_attn.q_proj"""
    return hf_name.removesuffix(_WEIGHT)


def leaf(hf_name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> q_proj"""
    return module_of(hf_name).rpartition(".")[2]


def default_targets(rows: Sequence[Row]) -> list[str]:
    """The names of all modules that can have an adapter, in the order of the table."""
    return list(dict.fromkeys(leaf(name) for row in rows if _refusal(row) == "" for name in row.hf))


def adapter_rows(rows: Sequence[Row], targets: Collection[str], rank: int) -> list[Row]:
    """Rows of the adapters of rank `rank` of all modules whose last name is one of `targets`; none of `targets`: of
    every module that can have one.

    Raises: ConversionError for a target that the model does not have, or that can have no adapter.
    """
    chosen = set(targets or default_targets(rows))
    known = default_targets(rows)
    for target in sorted(chosen - set(known)):
        reasons = {_refusal(row) for row in rows if row.hf and target in map(leaf, row.hf)}
        reason = next(iter(sorted(reasons)), "") or "the model has no such module"
        raise ConversionError(f"{target}: {reason}; possible are {', '.join(known)}")
    found = []
    for row in rows:
        parts = tuple(part for part, name in enumerate(row.hf) if leaf(name) in chosen)
        if parts and not _refusal(row):
            found += _factors(row, parts, rank)
    return found


def shared_with_experts(rows: Sequence[Row], targets: Collection[str]) -> list[str]:
    """Those of `targets` that routed experts have as well. PEFT (0.21, with transformers 5) takes such a name, whole or
    not, for that of the experts, whose matrices are fused, and reads no adapter of another module with it."""
    experts = {leaf(name) for row in rows if row.num_experts for name in row.hf}
    return [target for target in targets if target in experts]


def _refusal(row: Row) -> str:
    """Why a row's modules can have no adapter; "" when they can."""
    if row.place != "layer":
        return _REASONS["embedding"] if row.place in ("embedding", "head") else "it predicts several tokens ahead"
    if len(row.shapes[0]) != 2 or not row.mcore.endswith(_WEIGHT):
        return _REASONS["expert"] if row.num_experts else "it is no matrix"
    if ".router." in row.mcore:
        return _REASONS["router"]
    return _REASONS["expert"] if row.num_experts else ""


def _factors(row: Row, parts: tuple[int, ...], rank: int) -> list[Row]:
    modules = [module_of(row.hf[part]) for part in parts]
    shapes = [row.shapes[part] for part in parts]
    a = replace(
        row,
        mcore=row.mcore.removesuffix(_WEIGHT) + A,
        hf=tuple(f"{PREFIX}{module}.lora_A.weight" for module in modules),
        shapes=tuple((rank, columns) for _, columns in shapes),
        fp8=False,
        redundant=(),
    )
    b = replace(
        a,
        mcore=row.mcore.removesuffix(_WEIGHT) + B,
        hf=tuple(f"{PREFIX}{module}.lora_B.weight" for module in modules),
        shapes=tuple((rows, rank) for rows, _ in shapes),
    )
    if row.axis != "none" and row.dim == 1:
        return [a, replace(b, transform=Same(), axis="none", dim=0)]
    if len(parts) < len(row.hf):
        b = replace(b, transform=Subset(row.transform, tuple((rows, rank) for rows, _ in row.shapes), parts))
    return [replace(a, transform=Stacked(len(parts)), axis="none", dim=0), b]
