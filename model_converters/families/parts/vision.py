"""Vision towers of models that read images: their weights, and the positions of image tokens in the rotation.

The tower is transformers' module, replicated on the ranks of the first pipeline stage, under the names of its own
parameters:

| Megatron-Core | Hugging Face | transform | axis |
|---|---|---|---|
| `vision.blocks.0.attn.qkv.weight` | `model.visual.blocks.0.attn.qkv.weight` | Same | none |

A token has a position in time, height and width. Each pair of elements of a head rotates by one of the three:
`mrope_section` contains the number of pairs of each, in this order (blocks), or alternating from the first pair on
(interleaved), where pairs left over belong to time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig, integer, section, whole_numbers
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import Same, Shape

MCORE_PREFIX, _HF_PREFIX = "vision.", "model.visual."
_TEXT_PREFIX, _LANGUAGE_PREFIX = "model.", "model.language_model."
OWN_FIELDS = frozenset({"mrope_section", "vision_config"})
"""Part of Family.own_fields: engines and transformers read them alike."""


@dataclass(frozen=True)
class VisionArguments:
    """Vision tower of a model. `config` is vision_config, from which transformers builds it.

    image_token: id of the placeholder of an image's features.
    merge_size: rows and columns of patches that form one feature.
    patch_values: numbers in a patch.
    deepstack: number of further feature tensors, which are added to the outputs of the first decoder layers.
    """

    config: HFConfig
    image_token: int
    merge_size: int
    patch_values: int
    deepstack: int
    depth: int
    hidden_size: int
    intermediate_size: int


def deepstack_indexes(config: HFConfig) -> list[int]:
    """Return the blocks of the tower whose outputs are further features."""
    return whole_numbers(_vision_config(config), "deepstack_visual_indexes")


def read_vision(config: HFConfig) -> VisionArguments:
    """Read the tower's arguments.

    Raises: ConversionError, also for a tower whose features are not as wide as the text model.
    """
    vision = _vision_config(config)
    width, hidden = integer(vision, "out_hidden_size"), integer(config, "hidden_size")
    if width != hidden:
        raise ConversionError(
            f"config.json: vision_config.out_hidden_size {width} differs from the text model's hidden_size {hidden}"
        )
    indexes, depth = deepstack_indexes(config), integer(vision, "depth")
    if len(set(indexes)) < len(indexes) or max(indexes, default=0) >= depth:
        raise ConversionError(
            f"config.json: vision_config.deepstack_visual_indexes {indexes} must be different blocks of the {depth}"
        )
    if len(indexes) > integer(config, "num_hidden_layers"):
        raise ConversionError(
            f"config.json: vision_config.deepstack_visual_indexes has {len(indexes)} entries, more than decoder layers"
        )
    return VisionArguments(
        # The hub's files have the name of the whole model, or none, in vision_config.
        config={**vision, "model_type": f"{config['model_type']}_vision"},
        image_token=integer(config, "image_token_id", minimum=0),
        merge_size=_merge_size(vision),
        patch_values=_patch(vision)[0] * _patch(vision)[1] * _patch(vision)[2] ** 2,
        deepstack=len(indexes),
        depth=depth,
        hidden_size=integer(vision, "hidden_size"),
        intermediate_size=integer(vision, "intermediate_size"),
    )


def _vision_config(config: HFConfig) -> HFConfig:
    vision = section(config, "vision_config")
    if not vision:
        raise ConversionError(f"config.json of this {config.get('model_type')} model lacks vision_config")
    return vision


def _merge_size(vision: HFConfig) -> int:
    return integer(vision, "spatial_merge_size", default=2)


def _patch(vision: HFConfig) -> tuple[int, int, int]:
    """Return channels, frames and edge of a patch, with the defaults of transformers."""
    channels = integer(vision, "in_channels", "in_chans", default=3)
    return channels, integer(vision, "temporal_patch_size", default=2), integer(vision, "patch_size")


def language_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a text model under the names that they have inside a model with a vision tower."""

    def renamed(name: str) -> str:
        return _LANGUAGE_PREFIX + name.removeprefix(_TEXT_PREFIX) if name.startswith(_TEXT_PREFIX) else name

    return [
        replace(
            row,
            hf=tuple(map(renamed, row.hf)),
            redundant=tuple(map(renamed, row.redundant)),
            repeats=renamed(row.repeats),
            stored=tuple(replace(place, name=renamed(place.name)) for place in row.stored),
        )
        for row in rows
    ]


def _tower_rows(shapes: Mapping[str, Shape]) -> list[Row]:
    return [
        Row(
            mcore=f"{MCORE_PREFIX}{name}",
            hf=(f"{_HF_PREFIX}{name}",),
            shapes=(shape,),
            transform=Same(),
            place="embedding",
        )
        for name, shape in shapes.items()
    ]


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _layer_norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def qwen3_tower(config: HFConfig) -> list[Row]:
    """Return the rows of the tower of Qwen3-VL and Qwen3.5. Source: transformers models/qwen3_vl (5.19)."""
    vision = _vision_config(config)
    hidden, inner, out = (integer(vision, key) for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    channels, frames, edge = _patch(vision)
    merged = hidden * _merge_size(vision) ** 2
    shapes = {
        "patch_embed.proj.weight": (hidden, channels, frames, edge, edge),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (integer(vision, "num_position_embeddings"), hidden),
    }
    for block in (f"blocks.{index}" for index in range(integer(vision, "depth"))):
        shapes |= _layer_norm(f"{block}.norm1", hidden) | _layer_norm(f"{block}.norm2", hidden)
        shapes |= _linear(f"{block}.attn.qkv", 3 * hidden, hidden) | _linear(f"{block}.attn.proj", hidden, hidden)
        shapes |= _linear(f"{block}.mlp.linear_fc1", inner, hidden) | _linear(f"{block}.mlp.linear_fc2", hidden, inner)
    levels = range(len(whole_numbers(vision, "deepstack_visual_indexes")))
    # The norm of the last merger precedes the merging, the others' follow it.
    for merger, size in [("merger", hidden), *((f"deepstack_merger_list.{level}", merged) for level in levels)]:
        shapes |= _layer_norm(f"{merger}.norm", size)
        shapes |= _linear(f"{merger}.linear_fc1", merged, merged) | _linear(f"{merger}.linear_fc2", out, merged)
    return _tower_rows(shapes)


def qwen2_5_tower(config: HFConfig) -> list[Row]:
    """Return the rows of the tower of Qwen2.5-VL. Source: transformers models/qwen2_5_vl (5.19)."""
    vision = _vision_config(config)
    hidden, inner, out = (integer(vision, key) for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    channels, frames, edge = _patch(vision)
    merged = hidden * _merge_size(vision) ** 2
    shapes: dict[str, Shape] = {"patch_embed.proj.weight": (hidden, channels, frames, edge, edge)}
    for block in (f"blocks.{index}" for index in range(integer(vision, "depth"))):
        shapes |= {f"{block}.norm1.weight": (hidden,), f"{block}.norm2.weight": (hidden,)}
        shapes |= _linear(f"{block}.attn.qkv", 3 * hidden, hidden) | _linear(f"{block}.attn.proj", hidden, hidden)
        shapes |= _linear(f"{block}.mlp.gate_proj", inner, hidden) | _linear(f"{block}.mlp.up_proj", inner, hidden)
        shapes |= _linear(f"{block}.mlp.down_proj", hidden, inner)
    shapes["merger.ln_q.weight"] = (hidden,)
    return _tower_rows(shapes | _linear("merger.mlp.0", merged, merged) | _linear("merger.mlp.2", out, merged))


_AXES = ("mrope_section", "mrope_interleaved")


def without_sections(config: HFConfig) -> dict[str, object]:
    """Remove the rotation's sections. Older files call a rotation with sections `mrope`, newer ones `default`."""
    found = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        fields = {key: value for key, value in section(config, name).items() if key not in _AXES}
        fields |= {key: "default" for key in ("type", "rope_type") if fields.get(key) == "mrope"}
        if fields:
            found[name] = fields
    return found


def read_sections(config: HFConfig, default: Sequence[int], pairs: int) -> list[int]:
    """Read the number of pairs of elements that rotate by time, height and width.

    default: value of transformers' class. pairs: rotated pairs of a head.

    Raises: ConversionError for other than three numbers, and for sections beyond the pairs of a head.
    """
    rope = section(config, "rope_scaling") or section(config, "rope_parameters")
    sections = whole_numbers(rope, "mrope_section") or list(default)
    if len(sections) != 3 or sum(sections) != pairs:
        raise ConversionError(
            f"config.json: mrope_section {sections} must be three numbers whose sum is the {pairs} rotated pairs of a "
            "head"
        )
    return sections
