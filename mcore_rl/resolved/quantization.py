"""Sizes of a model that quantised rollouts (rollout.quantization) need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mcore_rl.config.quantization import BLOCK, INT4, UNQUANTIZED
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.errors import ConfigError
from model_converters.families import family_for
from model_converters.families.parts.hf_config import HFConfig
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import GroupedQKV, Heads


def check_blocks(role: EngineRole, hf_config: HFConfig) -> None:
    """Reject a model whose quantised matrices the engine would cut within a block.

    vLLM concatenates the parts of a fused projection, such as gate and up, and divides them among its ranks: both need
    whole blocks. Source: validate_fp8_block_shape in vLLM 0.32.

    Raises: ConfigError naming the first matrix.
    """
    if role.section.quantization == UNQUANTIZED:
        return
    if role.section.quantization == INT4:
        _check_engine_groups(role, hf_config)
        return
    key, tp = role.key("tp"), role.section.tp
    chosen = f"{role.key('quantization')}={role.section.quantization}"
    ranks = {"none": 1, "tp": tp, "etp": 1 if role.section.expert_parallel else tp}
    for row in family_for(hf_config).rows(hf_config):
        for name, size, side in _cut_sizes(row, ranks[row.axis]) if row.fp8 and row.place == "layer" else ():
            if size % BLOCK:
                remedy = f"{role.key('expert_parallel')}=true" if ranks[row.axis] > 1 and row.axis == "etp" else ""
                raise ConfigError(
                    f"{chosen} needs whole blocks of {BLOCK} x {BLOCK} on every rank, but with {key}={tp} one would "
                    f"hold {size:g} {side} of {name}; set {remedy or f'another {key}'}, or "
                    f"{role.key('quantization')}={UNQUANTIZED}"
                )


def _check_engine_groups(role: EngineRole, hf_config: HFConfig) -> None:
    """Raises: ConfigError for a model without experts, or a matrix of experts that does not have whole groups."""
    chosen = f"{role.key('quantization')}={INT4}"
    rows = _expert_rows(hf_config)
    if not rows:
        raise ConfigError(
            f"{chosen} quantises experts only, but the model of {role.checkpoint} has none; set it to fp8 or "
            f"{UNQUANTIZED}"
        )
    ranks = 1 if role.section.expert_parallel else role.section.tp
    cut = _cut_group(rows, ranks, role.section.quantization_group)
    if cut:
        remedies = [f"{role.key('expert_parallel')}=true"] * (ranks > 1) + [f"{role.key('quantization_group')}=32"]
        raise ConfigError(
            f"{chosen} needs whole groups of {role.section.quantization_group} elements on every rank, but with "
            f"{role.key('tp')}={role.section.tp} one would hold {cut}; set {' or '.join(remedies)}, or "
            f"{role.key('quantization')}={UNQUANTIZED}"
        )


def check_trained_groups(engines: EngineRole, trainer: ModelRole, hf_config: HFConfig, etp: int) -> None:
    """Reject a layout of the trainer that divides a group of INT4 engines. etp: ranks that divide the experts.

    Raises: ConfigError naming the matrix.
    """
    cut = engines.section.quantization == INT4 and _cut_group(
        _expert_rows(hf_config), etp, engines.section.quantization_group
    )
    if cut:
        key = trainer.key("parallel.etp")
        raise ConfigError(
            f"{key}={etp} gives a trainer rank {cut}, which divides a group of "
            f"{engines.key('quantization_group')}={engines.section.quantization_group}; set another {key}, or "
            f"{engines.key('quantization_group')}=32"
        )


def _expert_rows(hf_config: HFConfig) -> list[Row]:
    return [row for row in family_for(hf_config).rows(hf_config) if row.num_experts and row.place == "layer"]


def _cut_group(rows: Iterable[Row], ranks: int, group: int) -> str:
    """Return the first matrix of which one of `ranks` ranks holds a part of a group, as text; "" if none."""
    for row in rows:
        for name, (_, columns) in zip(row.hf, row.shapes, strict=True):
            held = columns / (ranks if row.dim == 1 else 1)
            if held % group:
                return f"{held:g} columns of {name.replace('{l}', str(row.layers[0])).replace('{e}', '0')}"
    return ""


def _cut_sizes(row: Row, ranks: int) -> Iterator[tuple[str, float, str]]:
    """Yield each matrix of a row with its rows or columns on one of `ranks` ranks, if it is divided, a part of a fused
    one or an input of latent attention, from whose codes and scales vLLM computes other matrices."""
    is_latent = isinstance(row.transform, Heads) and row.dim == 0
    if ranks == 1 and len(row.hf) == 1 and not is_latent:
        return
    side = "columns" if row.dim else "rows"
    groups = row.transform.num_groups if isinstance(row.transform, GroupedQKV) else ranks
    for part, (name, shape) in enumerate(zip(row.hf, row.shapes, strict=True)):
        # With more ranks than key-value heads, engines replicate the heads.
        held = min(ranks, groups) if part else ranks
        first = name.replace("{l}", str(row.layers[0])).replace("{e}", "0")
        yield first, shape[row.dim] / held, side
        if is_latent:
            yield first, shape[1], "columns"
