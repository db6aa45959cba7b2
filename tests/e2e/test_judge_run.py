"""Judges on a server and with SGLang give the answers of vLLM engines; a killed judge ends the run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ALPHABET, SECONDS_TO_END, TrainProcess, assert_same_records, train
from tests.tiny_models import write_tiny_model
from tests.vllm_server import vllm_server

pytestmark = pytest.mark.slow

TEMPLATE = "{prompt}{response}|{ground_truth}:"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|judge|>{% endif %}"
)
ANSWER_TOKENS = 12
QUESTION_TOKENS = 24
OVERRIDES = (
    "trainer.steps=1",
    "trainer.validate_before=false",
    "reward.weight=0.5",
    "reward.overlong.enable=false",
    "algorithm.dynamic_sampling.enable=false",
    "actor.offload.grads=true",
    f"judge.template={json.dumps(TEMPLATE)}",
    "judge.weight=0.25",
    "judge.unparsable=-3",
    "judge.num_engines=2",
    f"judge.max_prompt_tokens={QUESTION_TOKENS}",
    f"judge.max_response_tokens={ANSWER_TOKENS}",
    "judge.kv_cache_gib=0.03",
)
PARSER = """
import re

def last_digit(answer, finish_reason, data_source, ground_truth, extra_info):
    digits = list(re.finditer("[0-9]", answer))
    if not digits or finish_reason == "length" and digits[-1].end() == len(answer):
        return None
    return int(digits[-1][0])
"""


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge"))


def write_judge(directory: Path) -> Path:
    """Write a dense model with a chat template; its tokenizer has the policy's characters with other ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", "<|user|>", "<|judge|>", *reversed(ALPHABET)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|user|>", "<|judge|>"])
    sizes = {"vocab_size": len(vocabulary), "head_dim": 32, "eos_token_id": 0}
    write_tiny_model(directory, "qwen3", seed=5, std=0.2, **sizes)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def judged_run(task: Path, judge: Path) -> Path:
    directory = task.parent / "judged"
    (task.parent / "parser.py").write_text(PARSER)
    parser = f"judge.parser={task.parent / 'parser.py'}:last_digit"
    train(task, directory, *OVERRIDES, parser, f"judge.hf_path={judge}")
    return directory


@pytest.mark.on_demand
def test_judges_on_vllm_server_and_sglang_write_the_same_answers(
    task: Path, judge: Path, judged_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = f"judge.parser={task.parent / 'parser.py'}:last_digit"
    monkeypatch.setenv("JUDGE_KEY", "a secret")
    length = QUESTION_TOKENS + ANSWER_TOKENS
    with vllm_server(judge, length, "a secret") as url:
        own = ("judge.num_engines", "judge.kv_cache_gib")
        server = (f"judge.url={url}", f"judge.tokenizer_path={judge}", "judge.api_key_variable=JUDGE_KEY")
        train(task, tmp_path / "server", *(each for each in OVERRIDES if not each.startswith(own)), parser, *server)
    train(task, tmp_path / "sglang", *OVERRIDES, parser, f"judge.hf_path={judge}", "judge.engine=sglang")
    for directory in (tmp_path / "server", tmp_path / "sglang"):
        assert_same_records(directory, judged_run)
    kept = (tmp_path / "server").rglob("*")
    assert not any(b"a secret" in path.read_bytes() for path in kept if path.is_file())


@pytest.mark.on_demand
def test_a_killed_judge_ends_the_run_by_name(task: Path, judge: Path, tmp_path: Path) -> None:
    pattern = r"judge.score_pattern='([0-9])'"
    with TrainProcess(task, tmp_path / "run", (*OVERRIDES, pattern, f"judge.hf_path={judge}")) as run:
        run.kill_one("ray::JudgeProcess")
        killed = time.monotonic()
        assert run.finish(SECONDS_TO_END) == 1, run.text()[-4000:]
        assert re.search(r"^error: judge engine [01] died", run.text(), re.MULTILINE), run.text()[-4000:]
        assert not run.left_after(SECONDS_TO_END - (time.monotonic() - killed))
