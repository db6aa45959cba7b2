"""Default of run.dir, and placeholders in it."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.load import as_yaml
from mcore_rl.config.reading.run_directory import filled

MINIMAL = "model: {hf_path: models/x}\ndata: {train: train.jsonl}\n"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "base.yaml", tmp_path / "qwen3.5.yml"]
    paths[0].write_text(MINIMAL)
    paths[1].write_text("trainer: {steps: 3}\n")
    return [str(path) for path in paths]


def test_filled_has_names_of_files_date_and_time() -> None:
    now = datetime(2026, 11, 26, 5, 3, 1).astimezone()
    chosen = filled("runs/{name}-{date}-{time}", ["configs/base.yaml", "qwen3.5.yml"], now)
    assert chosen == "runs/base-qwen3.5-2026-11-26-050301"


def test_load_config_default_run_dir_is_new_for_each_start(files: list[str]) -> None:
    assert re.fullmatch(r"runs/base-qwen3\.5-\d{4}-\d\d-\d\d-\d{6}", load_config(files).run.dir)


def test_load_config_placeholders_of_own_run_dir_are_replaced(files: list[str]) -> None:
    config = load_config(files, ["run.dir=/data/{name}", "trainer.export_hf='${run.dir}/hf'"])
    assert (config.run.dir, config.trainer.export_hf) == ("/data/base-qwen3.5", "/data/base-qwen3.5/hf")
    assert load_config(files, ["run.dir=/data/{names}"]).run.dir == "/data/{names}"


def test_resolved_configuration_keeps_the_chosen_run_dir(files: list[str], tmp_path: Path) -> None:
    config = load_config(files)
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    assert load_config(tmp_path / "config.yaml").run.dir == config.run.dir
