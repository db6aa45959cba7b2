"""The demo's problems are right, separate and within their limits; its checkpoint is one that the hub could hold."""

from __future__ import annotations

import itertools
import json
import re
from math import prod
from pathlib import Path

import demo_task
import pytest
import yaml
from safetensors import safe_open
from tiny_processor import END, IMAGE, START

from mcore_rl.rewards.math_grader import is_correct

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module", params=["think2", "work3"])
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_answer_is_the_sum_and_every_shown_column_is_right(task: str) -> None:
    for problem in (p for split in demo_task.problems(task).values() for p in split):
        assert int(problem.answer) == eval(problem.prompt.rstrip("="))
        for left, right in re.findall(r"(\d\+\d\+\d)=(\d+)", problem.target):
            assert eval(left) == int(right)


def test_splits_share_no_problem_and_repeat_none(task: str) -> None:
    splits = demo_task.problems(task)
    prompts = [p.prompt for split in splits.values() for p in split]
    assert len(set(prompts)) == len(prompts)
    assert len(splits["val"]) == 256


@pytest.mark.parametrize("name", demo_task.TASKS)
def test_problems_depend_on_the_seed_alone(name: str) -> None:
    assert demo_task.problems(name, 3) == demo_task.problems(name, 3)
    assert demo_task.problems(name, 3) != demo_task.problems(name, 4)


def test_work3_shows_its_working_and_think2_mostly_does_not() -> None:
    assert all("#" in p.target for p in demo_task.problems("work3")["warm_start"])
    warm_start = demo_task.problems("think2")["warm_start"]
    shown = [p for p in warm_start if p.target.startswith("<")]
    assert 0.15 < len(shown) / len(warm_start) < 0.25
    assert all(p.target != p.answer for p in warm_start if p not in shown)


@pytest.fixture(scope="module", params=demo_task.TASKS)
def prepared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Directory of a task; its last part is the task's name."""
    directory = tmp_path_factory.mktemp("demo") / str(request.param)
    assert demo_task.prepare(directory, directory.name)
    return directory


def test_the_graders_answer_is_the_number_at_the_end(task: str) -> None:
    """A demo cannot learn if its right answers are graded as wrong."""
    for split in demo_task.problems(task).values():
        for problem in split[:200]:
            said = problem.target.rpartition("#")[2]
            assert is_correct(problem.target, problem.answer) == (said == problem.answer), problem
    assert any(is_correct(p.target, p.answer) for p in demo_task.problems(task)["warm_start"])


def test_preparing_twice_writes_once_and_leaves_no_other_file(prepared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert not demo_task.prepare(prepared, prepared.name)
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before
    assert list(prepared.parent.iterdir()) == [prepared]


def test_preparing_over_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="not a demo task"):
        demo_task.prepare(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"
    assert demo_task.main(["--out", str(tmp_path)]) == 2


def _with_all_pairs(texts: list[str]) -> list[str]:
    """Return the first texts in which each pair of neighbouring characters occurs."""
    seen, chosen = set[tuple[str, str]](), []
    for text in texts:
        pairs = set(itertools.pairwise(text))
        if pairs - seen:
            seen |= pairs
            chosen.append(text)
    return chosen


@pytest.mark.slow
def test_tokenizer_read_back_knows_every_text_and_model_id(prepared: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    # A random model samples any id; one that the tokenizer does not know would vanish from the text.
    config = json.loads((prepared / "model/config.json").read_text())
    assert len(tokenizer) == config.get("text_config", config)["vocab_size"]
    texts = [p.prompt + p.target for split in demo_task.problems(prepared.name).values() for p in split]
    # Processors of images replace the marker by these tokens.
    texts = [text.replace("<image>", f"{START}{IMAGE}{END}") for text in texts]
    one_per_character = prepared.name not in ("tool", "game", "see")
    if one_per_character:
        texts = _with_all_pairs(texts)
    for text, ids in zip(texts, tokenizer(texts, add_special_tokens=True)["input_ids"], strict=True):
        assert tokenizer.unk_token_id not in ids
        assert not one_per_character or len(ids) == len(text)
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"]) == texts
    assert tokenizer.decode([*tokenizer(texts[0])["input_ids"], 1], skip_special_tokens=True) == texts[0]


def test_the_checkpoint_names_experts_one_by_one_and_has_the_size_it_says(prepared: Path) -> None:
    with safe_open(prepared / "model/model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    experts = [name for name in shapes if re.fullmatch(r"model\.layers\.\d\.mlp\.experts\.\d\.\w+_proj\.weight", name)]
    num_sparse = {"latent": 3, "dense": 0, "see": 0}.get(prepared.name, 4)  # the first layer of latent is dense
    assert len(experts) == num_sparse * 8 * 3
    if num_sparse:
        assert shapes["model.layers.3.mlp.experts.7.gate_proj.weight"] == [128, 128]
    assert "lm_head.weight" in shapes
    parameters = [shape for name, shape in shapes.items() if not name.endswith("e_score_correction_bias")]  # a buffer
    count = sum(prod(shape) for shape in parameters)
    assert count == json.loads((prepared / demo_task.COMPLETE).read_text())["parameters"]
    assert 8e5 <= count <= 2e6


@pytest.mark.parametrize(
    "name", ["demo_cpu", "demo_fsdp2_cpu", "demo_latent_cpu", "demo_warm_start_cpu", "demo_think_cpu"]
)
def test_configurations_leave_room_for_the_longest_target(name: str) -> None:
    rollout = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["rollout"]
    assert rollout["max_response_tokens"] >= demo_task.MAX_TARGET_TOKENS
    assert rollout["max_prompt_tokens"] >= len("999+999=")
    assert rollout["max_prompt_tokens"] + rollout["max_response_tokens"] <= 256
