import numpy as np
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.batching import UpdateSchedule, build_batch, gather
from mcore_rl.data.loading import load_supervised
from mcore_rl.data.prompts import supervised_chunk
from mcore_rl.errors import ConfigError, DataError
from tests.unit.data.rows import jsonl

ROWS = [("1+1=", "2"), ("12+30=", "42"), ("5+5=", "10 "), ("100+200=", "300")]


def load(tmp_path, tokenizer, rows, *, prompt=64, response=64, **data):
    path = jsonl(tmp_path / "targets.jsonl", [{"question": question, "answer": answer} for question, answer in rows])
    limits = RolloutConfig(max_prompt_tokens=prompt, max_response_tokens=response)
    return load_supervised(path, tokenizer, DataConfig(**data), limits)


def test_supervised_chunk_trains_only_target_and_eos(tmp_path, tokenizer):
    data, report = load(tmp_path, tokenizer, ROWS)
    rows = np.array([2, 0, 2])
    buffers, scalars = supervised_chunk(data, rows)
    assert (len(data), report.kept) == (4, 4)
    for b, row in enumerate(rows):
        tokens = buffers.tokens[buffers.token_offsets[b] : buffers.token_offsets[b + 1]]
        prompt, target = ROWS[row]
        assert tokenizer.decode(tokens[: buffers.prompt_tokens[b]]) == prompt
        assert tokenizer.decode(tokens[buffers.prompt_tokens[b] :]) == target + "<|endoftext|>"
        assert buffers.response_offsets[b + 1] - buffers.response_offsets[b] == len(target) + 1
        assert scalars.total_tokens[b] == len(prompt) + len(target) + 1
        assert scalars.trained_tokens[b] == scalars.response_tokens[b] == len(target) + 1
    assert scalars.group_ids.tolist() == [0, 1, 2]
    assert scalars.prompt_rows.tolist() == [2, 0, 2]
    assert buffers.trained.all()
    assert len(buffers.trained) == len(buffers.versions) == len(buffers.logp_rollout) == buffers.response_offsets[-1]


def test_supervised_chunk_becomes_batch(tmp_path, tokenizer):
    data, _ = load(tmp_path, tokenizer, ROWS)
    buffers, scalars = supervised_chunk(data, np.arange(4))
    batch = build_batch(
        [buffers],
        gather([scalars]),
        weights_of=lambda trained, groups: np.full(len(trained), 1 / trained.sum(), np.float32),
        schedule=UpdateSchedule(prompts_per_update=4, num_dp_ranks=2),
    )
    assert (batch.loss_weights * batch.trained_tokens).sum() == pytest.approx(1)
    assert set(batch.dp_ranks.tolist()) == {0, 1}


def test_load_supervised_counts_both_limits_separately(tmp_path, tokenizer):
    # "42" with its EOS has 3 tokens: a limit of 2 must drop it, although the text alone would fit.
    data, report = load(tmp_path, tokenizer, ROWS, prompt=6, response=2)
    assert len(data) == 1
    assert report.dropped == 3
    assert "1 prompts longer than rollout.max_prompt_tokens=6" in report.limits
    assert "2 targets longer than rollout.max_response_tokens=2" in report.limits


def test_load_supervised_unusable_limits_are_rejected(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"data\.long_prompts=truncate_left.*set data\.long_prompts=drop"):
        load(tmp_path, tokenizer, ROWS, long_prompts="truncate_left")
    with pytest.raises(DataError, match=r"all 4 rows .*4 targets .*max_response_tokens=1.*raise the limits"):
        load(tmp_path, tokenizer, ROWS, response=1)


def test_load_supervised_missing_rows_or_targets_are_named(tmp_path, tokenizer):
    for target in ("", 5, None):
        with pytest.raises(DataError, match=r"targets\.jsonl, line 2 .*data\.answer_key"):
            load(tmp_path, tokenizer, [ROWS[0], ("q", target)])
    with pytest.raises(DataError, match="has no rows"):
        load(tmp_path, tokenizer, [])
