"""Parallel layout of a Megatron training job: coordinates of a rank and layers of a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from model_converters.errors import LayoutError
from model_converters.mapping.pipeline_layout import DECODER, MTP, check_stages, parse_stages


class Coordinates(NamedTuple):
    """Index of a rank along every parallel axis.

    tp, cp and dp apply to dense weights; etp, ep and edp to experts; pp to both.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class TrainLayout:
    """Sizes of the parallel axes, in Megatron's default rank order.

    Dense weights: rank = tp + TP * (cp + CP * (dp + DP * pp)).
    Experts: rank = etp + ETP * (ep + EP * (edp + EDP * pp)).
    Source: megatron.core.parallel_state.initialize_model_parallel, order "tp-cp-ep-dp-pp".

    `shard_parameters`: ranks with the same data-parallel weights hold rows of them (see placement.chunk_range).
    `hf_tensors`: ranks hold the tensors of HF checkpoints instead of Megatron's (see separate.py).

    `pipeline_layout` (see pipeline_layout.py) fixes the layers of every stage and virtual chunk, and thereby vpp.

    Raises: LayoutError if the sizes do not divide the world size.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    vpp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pipeline_layout: str | None = None
    shard_parameters: bool = False
    hf_tensors: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "ep", "etp", "cp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; it must be at least 1")
        dense, expert = self.tp * self.pp * self.cp, self.etp * self.ep * self.pp
        # dp and edp are the rest of the world size, so both products must divide it.
        if self.world_size % dense:
            raise LayoutError(
                f"world size {self.world_size} is not a multiple of "
                f"tp {self.tp} x pp {self.pp} x cp {self.cp} = {dense}"
            )
        if self.world_size % expert:
            raise LayoutError(
                f"world size {self.world_size} is not a multiple of "
                f"etp {self.etp} x ep {self.ep} x pp {self.pp} = {expert}"
            )
        self._check_stages()

    def _check_stages(self) -> None:
        if self.vpp is not None and self.vpp < 1:
            raise LayoutError(f"vpp is {self.vpp}; it must be at least 1, or unset")
        for name in ("first_stage_layers", "last_stage_layers"):
            layers = getattr(self, name)
            if layers is not None and layers < 1:
                raise LayoutError(f"{name} is {layers}; it must be at least 1, or unset")
        ends = self.first_stage_layers is not None or self.last_stage_layers is not None
        if self.pp == 1 and self.vpp is not None and self.vpp > 1:
            raise LayoutError(f"vpp {self.vpp} needs more than one pipeline stage; set pp > 1 or leave vpp unset")
        if self.pp == 1 and ends:
            raise LayoutError("first_stage_layers and last_stage_layers need more than one pipeline stage; set pp > 1")
        if self.pipeline_layout is None:
            return
        if ends:
            raise LayoutError("pipeline_layout replaces first_stage_layers and last_stage_layers; leave them unset")
        if self.pp == 1:
            raise LayoutError("pipeline_layout needs more than one pipeline stage; set pp > 1")
        self._follow_pipeline_layout(self.pipeline_layout)

    def _follow_pipeline_layout(self, text: str) -> None:
        stages = parse_stages(text)
        check_stages(text, stages)
        chunks, rest = divmod(len(stages), self.pp)
        if rest:
            raise LayoutError(f"pipeline_layout {text!r} has {len(stages)} stages, which pp {self.pp} does not divide")
        if (self.vpp or chunks) != chunks:
            raise LayoutError(
                f"pipeline_layout {text!r} has {len(stages)} stages, {chunks} for each of pp {self.pp}, but vpp is "
                f"{self.vpp}; leave vpp unset"
            )
        object.__setattr__(self, "vpp", chunks if chunks > 1 else None)  # the dataclass is frozen

    @property
    def num_mtp_layers(self) -> int | None:
        """Number of multi-token-prediction layers in pipeline_layout.

        None without pipeline_layout: Megatron then places all of the model's on the last stage.
        """
        return None if self.pipeline_layout is None else self.pipeline_layout_stages()[-1].count(MTP)

    def pipeline_layout_stages(self) -> tuple[str, ...]:
        """Return the characters of every stage of pipeline_layout, in execution order."""
        assert self.pipeline_layout is not None
        return parse_stages(self.pipeline_layout)

    @property
    def dp(self) -> int:
        """Data-parallel size of dense weights, context parallelism not included."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def stage_size(self) -> int:
        """Ranks per pipeline stage; stage p consists of ranks [p * stage_size, (p + 1) * stage_size)."""
        return self.world_size // self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank.

        Raises: LayoutError if the rank is not below the world size.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not in a world of {self.world_size}")
        # Invert the two formulas of the class docstring; both share pp.
        pp, inner = divmod(rank, self.stage_size)
        dense, tp = divmod(inner, self.tp)
        expert, etp = divmod(inner, self.etp)
        dp, cp = divmod(dense, self.cp)
        edp, ep = divmod(expert, self.ep)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, edp=edp)

    def dense_holders(self, stage: int, shard: int | None) -> range:
        """Return the ranks that hold tp shard `shard` (None: the whole tensor) of a dense weight of `stage`."""
        first = stage * self.stage_size
        if shard is None:
            return range(first, first + self.stage_size)
        # tp is the innermost axis: ranks with the same tp index are tp apart.
        return range(first + shard, first + self.stage_size, self.tp)

    def expert_holders(self, stage: int, ep: int, shard: int) -> range:
        """Return the ranks that hold etp shard `shard` of the experts with expert-parallel index `ep` in `stage`."""
        first = stage * self.stage_size
        # etp is the innermost axis, then ep.
        return range(first + shard + self.etp * ep, first + self.stage_size, self.etp * self.ep)

    def stage_layers(self, num_layers: int) -> list[list[range]]:
        """Return the global layers by [pipeline stage][virtual chunk]. Chunks are assigned to the stages round-robin.

        Source: megatron.core.transformer.transformer_layer.get_transformer_layer_offset.
        Raises: LayoutError if the layers cannot be divided.
        """
        stages: list[list[range]] = [[] for _ in range(self.pp)]
        start = 0
        for index, count in enumerate(self._chunk_counts(num_layers)):
            # In execution order the chunks go around the stages: chunk k is on stage k % pp.
            stages[index % self.pp].append(range(start, start + count))
            start += count
        return stages

    def stage_of_layer(self, num_layers: int) -> list[int]:
        """Return the pipeline stage of every global layer."""
        stages = [0] * num_layers
        for stage, chunks in enumerate(self.stage_layers(num_layers)):
            for layers in chunks:
                for layer in layers:
                    stages[layer] = stage
        return stages

    def final_norm_stage(self, num_layers: int) -> int:
        """Return the pipeline stage of the final norm.

        With multi-token prediction Megatron (0.16.1) puts it on the stage of the last decoder layer, otherwise on the
        last stage.
        """
        return self.stage_of_layer(num_layers)[-1] if self.num_mtp_layers else self.pp - 1

    def _chunk_counts(self, num_layers: int) -> list[int]:
        """Return the number of decoder layers of every chunk, in execution order."""
        if self.pipeline_layout is not None:
            counts = [stage.count(DECODER) for stage in self.pipeline_layout_stages()]
            if sum(counts) != num_layers:
                raise LayoutError(
                    f"pipeline_layout {self.pipeline_layout!r} places {sum(counts)} decoder layers (t), but the model "
                    f"has {num_layers} (num_hidden_layers)"
                )
            return counts
        chunks = self.vpp or 1
        counts = self._stage_counts(num_layers)
        for stage, count in enumerate(counts):
            if count % chunks:
                raise LayoutError(f"vpp {chunks} does not divide the {count} layers of pipeline stage {stage}")
        # All first chunks are executed before all second chunks.
        return [count // chunks for count in counts] * chunks

    def _stage_counts(self, num_layers: int) -> list[int]:
        first, last = self.first_stage_layers, self.last_stage_layers
        # Layers and stages that remain after the fixed first and last stage are divided evenly.
        left = num_layers - (first or 0) - (last or 0)
        stages = self.pp - (first is not None) - (last is not None)
        if left < 0 or (left > 0) != (stages > 0):
            raise LayoutError(
                f"first_stage_layers {first} and last_stage_layers {last} do not fit "
                f"the {num_layers} layers (num_hidden_layers) of pp {self.pp}"
            )
        if stages and left % stages:
            raise LayoutError(
                f"pp {self.pp}: {left} of the {num_layers} layers (num_hidden_layers) cannot be divided evenly over "
                f"{stages} pipeline stages; set first_stage_layers or last_stage_layers"
            )
        middle = [left // stages] * stages if stages else []
        return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]
