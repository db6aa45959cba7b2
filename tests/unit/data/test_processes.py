"""Several tokenising processes give the same rows and errors as one, and exit with the iteration."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.loading import load_prompts
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tokenised.blocks import Block, BlockTokeniser, RawBlock
from mcore_rl.data.tokenised.reader import tokenise_in_processes, with_progress
from mcore_rl.errors import DataError, WorkerDiedError
from tests.unit.data.rows import jsonl

BAD_ROW, BAD_LINE = 2100, "{torn"
"""Row of the third block without a prompt, and a line that is not JSON."""


@pytest.fixture(autouse=True)
def nothing_is_left(tokenizer: Any) -> Iterator[None]:
    """Compare with the children before the test: ranks of other tests may be running."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


def load(names: list[Path], tokenizer: Any, workers: int) -> PromptSet:
    config = DataConfig(workers=workers, plain_template="Q: {prompt}")
    return load_prompts(list(map(str, names)), tokenizer, config, RolloutConfig(max_prompt_tokens=9))[0]


def rows(count: int, name: str) -> list[str]:
    return [json.dumps({"question": f"{name}{i}", "answer": i, "extra_info": {"i": [i]}}) for i in range(count)]


@pytest.mark.slow
def test_several_processes_return_rows_in_the_order_of_one(tmp_path: Path, tokenizer: Any) -> None:
    names = [
        jsonl(tmp_path / f"{name}.jsonl", rows(count, name)) for name, count in (("a", 3000), ("b", 5), ("c", 1500))
    ]
    one, three = (load(names, tokenizer, workers) for workers in (1, 3))
    assert len(one) == 4505
    for name, value in vars(one).items():
        other = getattr(three, name)
        assert np.array_equal(value, other) if isinstance(value, np.ndarray) else value == other


def test_max_prompts_stops_reading_before_a_malformed_row(tmp_path: Path, tokenizer: Any) -> None:
    lines = rows(6000, "a")
    lines[5000] = BAD_LINE  # one process would not read it
    path, config = jsonl(tmp_path / "rows.jsonl", lines), DataConfig(workers=2)
    prompts, _ = load_prompts(path, tokenizer, config, RolloutConfig(), max_prompts=7)
    assert prompts.columns["ground_truth"] == list(range(7))


@pytest.mark.slow
@pytest.mark.parametrize("torn_block", [2, 3])
def test_first_malformed_row_of_the_file_is_reported(tmp_path: Path, tokenizer: Any, torn_block: int) -> None:
    lines = rows(5000, "a")
    lines[BAD_ROW], lines[torn_block * 1024 + 100] = '{"other": 1}', BAD_LINE
    names, messages = [jsonl(tmp_path / "rows.jsonl", lines)], []
    for workers in (1, 2):
        with pytest.raises(DataError) as caught:
            load(names, tokenizer, workers)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    # A block is read completely before its rows are tokenised.
    assert ("line 2149 is not valid JSON" if torn_block == 2 else "line 2101 has no prompt") in messages[0]


def test_death_of_a_process_raises_instead_of_ending_the_data(tmp_path: Path, tokenizer: Any) -> None:
    tokeniser = BlockTokeniser(tokenizer, DataConfig(workers=1), RolloutConfig(), "data.train")

    before = set(psutil.Process().children())

    def blocks():  # type: ignore[no-untyped-def]
        for number in range(3):
            yield RawBlock(0, tmp_path / "a.jsonl", [("a place", json.loads(rows(1, "a")[0]))])
            if number == 0:
                (child,) = set(psutil.Process().children()) - before
                child.kill()

    with pytest.raises(WorkerDiedError, match=r"data\.workers=1.* ended in `tokenise` with signal SIGKILL"):
        list(tokenise_in_processes(blocks(), tokeniser))


def test_progress_starts_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("mcore_rl.data.tokenised.reader.time", SimpleNamespace(monotonic=lambda: now[0]))

    def blocks() -> Iterator[Block]:
        for seconds, file in ((0.5, 0), (1.9, 0), (2.5, 1), (10.0, 1), (40.0, 1)):
            now[0] = seconds
            yield Block(file, [None] * 1000, [], Counter())  # type: ignore[list-item]

    stream = io.StringIO()
    assert len(list(with_progress(blocks(), "data.train", [Path("a.jsonl"), Path("b.jsonl")], stream))) == 5
    assert stream.getvalue().splitlines() == [
        "data.train: 3,000 rows tokenised (file 2 of 2, b.jsonl)  1,200 rows/s",
        "data.train: 5,000 rows tokenised (file 2 of 2, b.jsonl)  125 rows/s",
    ]


def test_progress_on_a_terminal_changes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.data.tokenised.reader.QUIET_SECONDS", 0.0)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    list(with_progress([Block(0, [None] * 10, [], Counter())], "data.train", [Path("[a].jsonl")], stream))  # type: ignore[list-item]
    assert "data.train: 10 rows tokenised ([a].jsonl)" in stream.getvalue()
