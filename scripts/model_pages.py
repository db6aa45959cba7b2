"""Generate docs/models/, one page per model with a recipe in configs/: memory, layout and expected time by the plan.

python scripts/model_pages.py

Takes about a minute: `mcore-rl plan` of every recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mcore_rl.planner.import_warnings  # noqa: F401  (before Megatron)
from mcore_rl.config import load_config
from mcore_rl.config.rules.validation import read_hf_config
from mcore_rl.config.schema import Config
from mcore_rl.planner.engine import GIB
from mcore_rl.planner.phases import usable_bytes
from mcore_rl.planner.plan import Plan, make_plan
from mcore_rl.resolved.layout import model_arguments
from model_converters.families import family_for

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "models"
CONFIGS = ROOT / "configs"
INDEX = """\
# Models

After reading this page you can choose a model with a recipe. The page of a model has the memory, layout, communication
and expected time of each recipe, by `mcore-rl plan`, and the commands to start it. [Families](../families.md) lists all
models that can be trained; `mcore-rl plan` with `--suggest` finds a layout for a model without a recipe.

These pages are generated from `configs/` by `python scripts/model_pages.py`.

| model | family | parameters in billions | active per token | GPUs of the recipes |
|---|---|---|---|---|
"""
HEADER = """\
# {name}

After reading this page you can choose a recipe for {name} and start it on your data, and you know its memory, layout
and expected time. The numbers are those of `mcore-rl plan`; no recipe for GPUs has been run yet.
[Preflight](../plan.md) explains how far the numbers can be trusted.

This page is generated from `configs/` by `python scripts/model_pages.py`.
"""
MEMORY_ABOUT = """\
Numbers are the largest of all trainer ranks. State is weights, gradients and Adam, without Adam if it is always in host
memory. The peak is a GPU's memory in the fullest phase, with the engine if they share it. Sequences are of full length,
per engine.
"""
SYNC_ABOUT = """\
A weight sync sends each engine rank its slices once per step. Groups of ranks within a host communicate over NVLink;
all other groups, and the sync between hosts, use the network.
"""
STEP_ABOUT = """\
The seconds are an order of magnitude: FLOP and bytes divided by assumed rates. Responses have the mean length of the
second table; rewards and checkpoints take no time. A synchronous step is the sum of its phases. An asynchronous step
(`rollout.max_staleness` above 0) is the longer of generation and training, plus the weight sync between hosts if
`plan.network_gib_per_second` is set.
"""


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe with its plan.

    name: file in configs/; a file in configs/sglang/ is merged into the file of the same name in configs/.
    about: its first comment.
    hf_config: config.json of the model.
    """

    name: str
    about: str
    config: Config
    hf_config: dict[str, Any]
    plan: Plan

    @classmethod
    def read(cls, name: str) -> PlannedRecipe:
        """Read and plan a recipe. Paths in it are relative to the repository."""
        with chdir(ROOT):
            config = load_config(recipe_files(name), needs_data=False)
            hf_config, plan = read_hf_config(config.model), make_plan(config)
        return cls(name, first_comment((CONFIGS / name).read_text(encoding="utf-8")), config, hf_config, plan)

    @property
    def gpus(self) -> str:
        cluster = self.config.cluster
        return f"{cluster.nodes * cluster.gpus_per_node} x {cluster.gpu_memory_gib:g} GB"


def recipe_files(name: str) -> list[str]:
    """Return the files that a command gets for a recipe, relative to the repository."""
    return [f"configs/{each}" for each in dict.fromkeys((Path(name).name, name))]


def first_comment(text: str) -> str:
    """Return the comment at the beginning of a YAML file without its marks."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def recipes_by_model() -> dict[str, list[str]]:
    """Return the recipes for GPUs of each model directory in configs/models/."""
    found: dict[str, list[str]] = {}
    for path in (*sorted(CONFIGS.glob("*.yaml")), *sorted(CONFIGS.glob("sglang/*.yaml"))):
        name = str(path.relative_to(CONFIGS))
        config = load_config([ROOT / file for file in recipe_files(name)], needs_data=False)
        if config.cluster.device == "cuda":
            found.setdefault(Path(config.model.hf_path).name, []).append(name)
    return dict(sorted(found.items()))


def page(model: str, recipes: Sequence[PlannedRecipe]) -> str:
    """Render the page of a model; its sections are the same for all models."""
    sections: dict[str, Iterator[str] | list[str]] = {
        "Model": _properties(model_properties(recipes[0])),
        "GPUs and memory": [MEMORY_ABOUT, *_table(MEMORY, recipes)],
        "Layout": _table(LAYOUT, recipes),
        "Communication": [SYNC_ABOUT, *_table(SYNC, recipes)],
        "Expected step": [STEP_ABOUT, *_table(STEPS, recipes), "", *_table(ASSUMPTIONS, recipes)],
        "Start": _start(recipes),
        "Limits": _limits(recipes),
    }
    lines = [HEADER.format(name=model)]
    for title, section in sections.items():
        lines += [f"## {title}", "", *section, ""]
    return "\n".join(lines).rstrip() + "\n"


def index(models: Mapping[str, Sequence[PlannedRecipe]]) -> str:
    """Render the list of the models."""
    rows = []
    for model, recipes in models.items():
        size = recipes[0].plan.size
        family = recipes[0].hf_config["model_type"]
        counts = ", ".join(dict.fromkeys(recipe.gpus for recipe in recipes))
        cells = f"[{model}]({model}.md)", f"`{family}`", _billions(size.total), _billions(size.active), counts
        rows.append(_row(cells))
    return INDEX + "\n".join([*rows, "", "```{toctree}", ":hidden:", "", *models, "```"]) + "\n"


def model_properties(recipe: PlannedRecipe) -> dict[str, str]:
    """Return the facts about the model from its config.json."""
    hf_config = recipe.hf_config
    arguments = model_arguments(hf_config)
    sizes, size = arguments.transformer, recipe.plan.size
    layers, experts = f"{sizes['num_layers']}", "none"
    if sizes.get("num_moe_experts"):
        # Without a pattern, every layer has experts.
        sparse = sum(sizes.get("moe_layer_freq", [1] * sizes["num_layers"]))
        layers += f": {sizes['num_layers'] - sparse} dense, {sparse} with experts"
        shared = sizes.get("moe_shared_expert_intermediate_size", 0) // sizes["moe_ffn_hidden_size"]
        experts = f"{sizes['num_moe_experts']} routed, {sizes['moe_router_topk']} per token, {shared} shared"
    heads = f"{sizes['num_attention_heads']} heads"
    latent = sizes.get("multi_latent_attention")
    groups = f"latent, rank {sizes['kv_lora_rank']}" if latent else f"{sizes['num_query_groups']} key-value heads"
    return {
        "family": f"`{hf_config['model_type']}`; supported: {family_for(hf_config).description.covers}",
        "parameters": f"{_billions(size.total)} billion, {_billions(size.active)} active per token",
        "layers": layers,
        "hidden size": f"{sizes['hidden_size']:,}",
        "attention": f"{heads}, {groups}",
        "experts": experts,
        "vocabulary": f"{arguments.vocab_size:,}",
        "positions": f"{hf_config['max_position_embeddings']:,}",
        "layers of multi-token prediction": f"{hf_config.get('num_nextn_predict_layers') or 0}",
    }


Column = Callable[[PlannedRecipe], str]


def _axis(name: str) -> Column:
    return lambda recipe: f"{getattr(recipe.plan.layout, name) or 1}"


MEMORY: dict[str, Column] = {
    "GPUs": lambda recipe: recipe.gpus,
    "state": lambda recipe: _gib(max(rank.state.total_bytes for rank in recipe.plan.ranks)),
    "activations": lambda recipe: _gib(max(rank.activation_bytes for rank in recipe.plan.ranks)),
    "peak": lambda recipe: f"{_gib(recipe.plan.fullest.phases.peak_bytes)} ({recipe.plan.fullest.phases.widest})",
    "usable": lambda recipe: _gib(usable_bytes(recipe.config.cluster)),
    "engine's weights": lambda recipe: _gib(recipe.plan.times.engine.weights_bytes),
    "sequences in the KV cache": lambda recipe: f"{recipe.plan.times.engine.sequences:.1f}",
    "host memory per node": lambda recipe: _gib(recipe.plan.verdict.host.total),
}
LAYOUT: dict[str, Column] = {
    **{name: _axis(name) for name in ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp")},
    "layers of first, last stage": lambda recipe: _ends(recipe),
    "recompute": lambda recipe: recipe.config.actor.recompute,
    "in host memory": lambda recipe: _away(recipe),
    "engines": lambda recipe: _engines(recipe),
}
SYNC: dict[str, Column] = {
    "per engine rank": lambda recipe: _gib(recipe.plan.sync.bytes_per_engine_rank),
    "least possible": lambda recipe: _gib(recipe.plan.sync.floor_bytes_per_engine_rank),
    "buckets": lambda recipe: f"{recipe.plan.sync.buckets}",
    "transport": lambda recipe: f"`{recipe.plan.sync.transport}`",
    "across hosts, all ranks": lambda recipe: _gib(recipe.plan.sync.bytes_crossing_hosts),
    "busiest sender": lambda recipe: _gib(recipe.plan.sync.busiest_sender_bytes),
    "peers of a rank": lambda recipe: f"{recipe.plan.sync.max_peers}",
    "groups within a host": lambda recipe: _groups_within_a_host(recipe),
}
STEPS: dict[str, Column] = {
    "responses": lambda recipe: f"{recipe.plan.times.batch.responses:,}",
    "tokens": lambda recipe: f"{recipe.plan.times.batch.tokens / 1e6:.1f} million",
    "updates": lambda recipe: f"{recipe.plan.times.batch.updates}",
    "generate": lambda recipe: _seconds(_phases(recipe)[0]),
    "logp": lambda recipe: _seconds(recipe.plan.seconds.logp),
    "update": lambda recipe: _seconds(recipe.plan.seconds.update),
    "step": lambda recipe: _seconds(step_seconds(recipe)),
}
ASSUMPTIONS: dict[str, Column] = {
    "peak TFLOPS": lambda recipe: _number(recipe.config.plan.peak_tflops),
    "memory GiB/s": lambda recipe: _number(recipe.config.plan.memory_bandwidth_gib_per_second),
    "share of the peak in updates": lambda recipe: f"{recipe.config.plan.mfu_update:g}",
    "logp": lambda recipe: f"{recipe.config.plan.mfu_logp:g}",
    "prefill": lambda recipe: f"{recipe.config.plan.mfu_prefill:g}",
    "mean response, tokens": lambda recipe: f"{recipe.plan.times.batch.mean_response:,.0f}",
    "load of the fullest expert rank": lambda recipe: f"{recipe.config.plan.moe_imbalance:g} x mean",
}


def step_seconds(recipe: PlannedRecipe) -> float | None:
    """Return the time of a step; None if an assumption is not set."""
    overlap = recipe.plan.overlap
    if overlap is not None:
        return overlap.step_seconds
    phases = [seconds for seconds in _phases(recipe) if seconds is not None]
    return sum(phases) if len(phases) == len(_phases(recipe)) else None


def _phases(recipe: PlannedRecipe) -> tuple[float | None, float | None, float | None]:
    seconds, overlap = recipe.plan.seconds, recipe.plan.overlap
    return overlap.generate_seconds if overlap is not None else seconds.generate, seconds.logp, seconds.update


def _start(recipes: Sequence[PlannedRecipe]) -> Iterator[str]:
    yield "`DIR` is the downloaded checkpoint ([SLURM](../slurm.md) describes the job, [data](../data.md) the files):"
    yield ""
    for recipe in recipes:
        yield f"    mcore-rl plan {' '.join(recipe_files(recipe.name))}"
    # The other recipes of one file are started like the first.
    for name in (recipes[0].name, *(recipe.name for recipe in recipes[1:] if len(recipe_files(recipe.name)) > 1)):
        yield ""
        yield f"    mcore-rl slurm {' '.join(recipe_files(name))} model.hf_path=DIR data.train=train.jsonl \\"
        yield "        data.val=test.jsonl slurm.partition=gpu > job.sbatch && sbatch job.sbatch"


def _limits(recipes: Sequence[PlannedRecipe]) -> Iterator[str]:
    for recipe in recipes:
        yield f"### {recipe.name}"
        yield ""
        yield recipe.about
        yield ""
        notes = [f"Cannot run yet: {reason}" for reason in recipe.plan.cannot_run]
        notes += [f"Does not fit: {error}" for error in recipe.plan.verdict.errors]
        notes += [f"Warning of the plan: {warning}" for warning in recipe.plan.verdict.warnings]
        yield from (f"- {note}" for note in notes)
        if notes:
            yield ""


def _ends(recipe: PlannedRecipe) -> str:
    sizes = model_arguments(recipe.hf_config).transformer
    stages = recipe.plan.layout.stage_layers(sizes["num_layers"])
    first, last = (sum(map(len, chunks)) for chunks in (stages[0], stages[-1]))
    return f"{first}, {last}"


def _engines(recipe: PlannedRecipe) -> str:
    rollout = recipe.config.rollout
    name = {"vllm": "vLLM", "sglang": "SGLang"}[rollout.engine]
    experts = ", whole experts" if rollout.expert_parallel else ""
    attention = ", data-parallel attention" if rollout.data_parallel_attention else ""
    return f"{rollout.num_engines} x {name}, tp {rollout.tp}{experts}{attention}"


def _away(recipe: PlannedRecipe) -> str:
    actor = recipe.config.actor
    always = ["Adam"] if actor.optimizer.cpu_offload else []
    between = [name for name in ("params", "grads", "optimizer") if getattr(actor.offload, name)]
    return "; ".join([*always, *([f"between phases {', '.join(between)}"] if between else [])]) or "nothing"


def _groups_within_a_host(recipe: PlannedRecipe) -> str:
    layout, size = recipe.plan.layout, recipe.config.cluster.gpus_per_node
    # The ranks of these groups are consecutive, or lie in a block of this length (TrainLayout's rank order).
    blocks = {"tp": layout.tp, "cp": layout.tp * layout.cp, "ep": layout.etp * layout.ep}
    return ", ".join(name for name, block in blocks.items() if block <= size and getattr(layout, name) > 1) or "none"


def _properties(facts: Mapping[str, str]) -> list[str]:
    return ["| | |", "|---|---|", *(_row(fact) for fact in facts.items())]


def _table(columns: Mapping[str, Column], recipes: Sequence[PlannedRecipe]) -> list[str]:
    rows = [(f"`{recipe.name}`", *(column(recipe) for column in columns.values())) for recipe in recipes]
    return [_row(("recipe", *columns)), f"|{'---|' * (len(columns) + 1)}", *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


def _billions(number: int) -> str:
    return f"{number / 1e9:.1f}"


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:,.0f} s"


def _number(value: float | None) -> str:
    return "not set" if value is None else f"{value:,g}"


def write_pages(folder: Path = FOLDER) -> list[Path]:
    """Plan all recipes, write the pages, and remove pages of former models."""
    folder.mkdir(exist_ok=True)
    models = {model: [PlannedRecipe.read(name) for name in names] for model, names in recipes_by_model().items()}
    texts = {f"{model}.md": page(model, recipes) for model, recipes in models.items()} | {"index.md": index(models)}
    for stale in {path.name for path in folder.glob("*.md")} - set(texts):
        (folder / stale).unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


if __name__ == "__main__":
    print(*write_pages(), sep="\n")
