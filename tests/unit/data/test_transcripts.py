"""Transcripts: responses with their prompts, decoded for graders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.loading import load_prompts
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.transcripts import transcripts
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import Trajectory, TrajectoryBuffers
from tests.unit.data.rows import jsonl

CHAT = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "2+2?"}]
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": CHAT, "answer": "4"}]


@pytest.fixture
def prompts(tmp_path: Path, tokenizer: Any) -> PromptSet:
    return load_prompts(jsonl(tmp_path / "prompts.jsonl", ROWS), tokenizer, DataConfig(), RolloutConfig())[0]


def buffers_of(prompts: PromptSet, tokenizer: Any, answers: list[tuple[int, str]]) -> TrajectoryBuffers:
    """Build buffers like a rollout worker; every response ends with the end-of-text token."""
    trajectories = []
    for row, text in answers:
        ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
        trajectories.append(Trajectory(prompts[row].token_ids, ids, np.zeros(len(ids), np.float32), 0 * ids))
    return pack_trajectories(trajectories)


def test_transcripts_have_prompt_and_no_special_tokens(prompts: PromptSet, tokenizer: Any) -> None:
    buffers = buffers_of(prompts, tokenizer, [(1, "four"), (1, ""), (0, "zwei ä")])
    found = transcripts(buffers, np.array([1, 1, 0]), prompts, tokenizer)
    assert [(each.prompt.row, each.response) for each in found] == [(1, "four"), (1, ""), (0, "zwei ä")]
    assert found[0].prompt.messages == CHAT


def test_transcripts_end_before_stop_string_of_run_or_row(prompts: PromptSet, tokenizer: Any) -> None:
    """Only a stop string at the end of the response is removed."""
    buffers = buffers_of(prompts, tokenizer, [(0, "4 END"), (1, "END 5 STOP"), (0, "END 6")])
    unended = replace(buffers, tokens=np.delete(buffers.tokens, buffers.token_offsets[1:] - 1))
    steps = np.arange(4)
    cut = replace(
        unended, token_offsets=buffers.token_offsets - steps, response_offsets=buffers.response_offsets - steps
    )
    own = {0: prompts[0], 1: replace(prompts[1], sampling={"stop": ["STOP"]})}
    read = transcripts(cut, np.array([0, 1, 0]), own, tokenizer, ["END"])
    assert [each.response for each in read] == ["4 ", "END 5 ", "END 6"]
