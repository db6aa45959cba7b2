"""Per-token values in a report: texts of tokens, and their connection with responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mcore_rl.observe.report.token_pieces import Pieces
from tests.recorded_run import groups, response, write_run
from tests.unit.observe.report.pages_of import alerts_of, blocks_of, run_of

TEXTS = ["a plain sentence", " leading and trailing ", "déjà vu, 北京 and 🙂👍", "\n\ttabs\r\n", "</script>"]


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_bytes_join_to_the_text(text: str) -> None:
    ids = byte_tokenizer().encode(text).ids
    pieces = Pieces(byte_tokenizer()).split(ids)
    assert len(pieces) == len(ids) == len(text.encode())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_invalid_bytes_do_not_hide_later_text() -> None:
    tokenizer = byte_tokenizer()
    invalid = tokenizer.encode("北").ids[:1] * 30
    pieces = Pieces(tokenizer).split([*invalid, *tokenizer.encode("then text").ids])
    assert "".join(pieces).endswith("then text")


def token_record(digest: int, text: str = "abc") -> dict[str, object]:
    ids = byte_tokenizer().encode(text).ids
    return {"digest": digest, "token_ids": ids, "logp_rollout": [-0.5, -1.0], "logp_policy": [-0.25, -1.123456]}


def run_with_tokens(directory: Path, *records: dict[str, object]) -> Path:
    config = f"trainer: {{steps: 3}}\nmodel: {{hf_path: {directory}}}\n"
    others = groups(8)
    others[40 % len(others)]["digest"] = 77
    run = write_run(directory, {"step_1": others}, config=config)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (run / "tokens").mkdir()
    (run / "tokens" / "step_1.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_report_tokens_have_text_and_both_log_probabilities(tmp_path: Path) -> None:
    blocks = blocks_of(run_with_tokens(tmp_path / "run", token_record(77)))
    (tokens,) = blocks["run0.tokens1"]
    assert tokens["texts"] == ["a", "b", "c"]
    assert (tokens["engine"], tokens["trainer"]) == ([-0.5, -1.0], [-0.25, -1.1235])
    shown, index = blocks["run0.responses0"], blocks["summary"]["runs"][0]["responses"]["index"]
    # The response with values comes first.
    assert shown[0]["digest"] == 77
    assert index["tokens_recorded"] == [1] + [0] * (len(shown) - 1)


def test_report_tokens_without_tokenizer_are_numbers(tmp_path: Path) -> None:
    run = run_with_tokens(tmp_path / "run", token_record(77))
    (run / "tokenizer.json").unlink()
    assert blocks_of(run)["run0.tokens1"][0]["texts"][0].startswith("<")
    assert any("tokens are shown as their numbers" in alert for alert in alerts_of(run))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [-1]},
        {"token_ids": [10**30]},
        {"token_ids": "abc"},
        {"digest": None},
        {"logp_policy": None},
        {"logp_rollout": ["x"]},
    ],
)
def test_report_tokens_of_unknown_form_are_left_out(tmp_path: Path, change: dict[str, object]) -> None:
    run = run_with_tokens(tmp_path / "run", token_record(77) | change, token_record(5))
    assert [tokens["digest"] for tokens in blocks_of(run)["run0.tokens1"]] == [5]
    assert any("1 lines have an unknown form" in alert for alert in alerts_of(run))


def test_report_mask_is_shown_as_spans(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"step_1": [response(mask=[1, 0, 0, 1, 0])]})
    (record,) = blocks_of(run)["run0.responses0"]
    assert record["masked"] == [[1, 3], [4, 5]]
    assert "mask" not in record
    assert run_of(run)["responses"]["index"]["right"] == [0]
