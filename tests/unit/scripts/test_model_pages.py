"""Pages of docs/models/: sections, and their agreement with the plan of each recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
from model_pages import FOLDER, ROOT, PlannedRecipe, first_comment, page, recipe_files, recipes_by_model, step_seconds

from mcore_rl.planner.engine import GIB
from tests.selection import on_demand_unless

SECTIONS = ["Model", "GPUs and memory", "Layout", "Communication", "Expected step", "Start", "Limits"]
MODELS = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
"""Models that have a page. Every test process collects this file, so it reads no recipe."""
QUICK = "Qwen3-30B-A3B"
"""Model with experts whose recipes, a synchronous and an asynchronous one, are planned in seconds."""


@pytest.fixture(scope="module")
def recipes() -> dict[str, list[str]]:
    """Recipes by model."""
    return recipes_by_model()


@pytest.fixture(scope="module")
def recipes_of(recipes: dict[str, list[str]]) -> Callable[[str], list[PlannedRecipe]]:
    """Return a function that plans the recipes of a model, once."""
    return cache(lambda model: [PlannedRecipe.read(name) for name in recipes[model]])


def table(text: str, section: str, place: int = 0) -> dict[str, dict[str, str]]:
    """Return a table of a section: the cells of each recipe by column."""
    part = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"(?:^\|.*\n)+", part, flags=re.MULTILINE)[place].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows}


def test_every_recipe_for_gpus_is_on_the_page_of_its_model(recipes: dict[str, list[str]]) -> None:
    paths = (*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs").glob("sglang/*.yaml"))
    large = {str(path.relative_to(ROOT / "configs")) for path in paths if not path.name.endswith("_cpu.yaml")}
    assert {name for names in recipes.values() for name in names} == large
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *recipes}
    for model, names in recipes.items():
        text = (FOLDER / f"{model}.md").read_text(encoding="utf-8")
        assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == SECTIONS
        assert re.findall(r"^### (.*)$", text, flags=re.MULTILINE) == names
        started = re.findall(r"^    mcore-rl slurm (.*) model\.hf_path=DIR", text, flags=re.MULTILINE)
        assert started == [" ".join(recipe_files(name)) for name in names if name == names[0] or "/" in name]
        assert f"[{model}]({model}.md)" in (FOLDER / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", [pytest.param(name, marks=on_demand_unless(name == QUICK)) for name in MODELS])
def test_page_has_the_numbers_of_the_plan(model: str, recipes_of: Callable[[str], list[PlannedRecipe]]) -> None:
    text = (FOLDER / f"{model}.md").read_text(encoding="utf-8")
    assert text == page(model, recipes_of(model)), "run: python scripts/model_pages.py"


def test_memory_and_layout_are_those_of_the_json(recipes_of: Callable[[str], list[PlannedRecipe]]) -> None:
    recipes = recipes_of(QUICK)
    text = page(QUICK, recipes)
    for recipe in recipes:
        numbers = recipe.plan.to_json()
        per_rank, layout = numbers["per_rank"], numbers["layout"]
        assert isinstance(per_rank, list)
        assert isinstance(layout, dict)
        peak = max(rank["peak_bytes"] for rank in per_rank) / GIB
        memory = table(text, "GPUs and memory")[recipe.name]
        assert memory["peak"].startswith(f"{peak:.1f} GiB (")
        assert memory["state"] == f"{max(rank['state_bytes'] for rank in per_rank) / GIB:.1f} GiB"
        shown = table(text, "Layout")[recipe.name]
        assert [shown[name] for name in ("tp", "ep", "dp")] == [str(layout[name]) for name in ("tp", "ep", "dp")]


def test_step_is_sum_of_phases_or_the_longer_side(recipes_of: Callable[[str], list[PlannedRecipe]]) -> None:
    alone, ahead = sorted(recipes_of(QUICK), key=lambda recipe: recipe.config.rollout.max_staleness)
    seconds, overlap = alone.plan.seconds, ahead.plan.overlap
    assert None not in (seconds.generate, seconds.logp, seconds.update)
    assert step_seconds(alone) == sum((seconds.generate or 0, seconds.logp or 0, seconds.update or 0))
    assert overlap is not None
    assert overlap.generate_seconds is not None
    assert overlap.train_seconds is not None
    longer = max(overlap.generate_seconds, overlap.train_seconds) + (overlap.swap_seconds or 0)
    assert step_seconds(ahead) == pytest.approx(longer)
    shown = table(page(QUICK, [alone, ahead]), "Expected step")
    assert shown[ahead.name]["step"] == f"{longer:,.0f} s"


def test_first_comment_ends_at_the_first_key() -> None:
    assert first_comment("# One,\n#\n# - two\nrun:\n  # three\n") == "One,\n\n- two"
