"""A run with a judge and a reward function, whose engines alternate on a device.

The judge's answers are in rewards and records and equal transformers' output for the same weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.runs import ALPHABET, TrainProcess, metrics, train
from tests.e2e.test_failures import SECONDS_TO_END
from tests.tiny_models import write_tiny_model

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


def records(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts" / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def written_by_transformers(judge: Path) -> Callable[[dict[str, Any]], tuple[list[int], str, bool]]:
    """Function of a record that returns the question, transformers' greedy answer, and whether it was cut."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(judge)
    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32, attn_implementation="eager").eval()

    def write(record: dict[str, Any]) -> tuple[list[int], str, bool]:
        content = f"{record['prompt']}{record['response']}|{record['ground_truth']}:"
        messages = [{"role": "user", "content": content}]
        question = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids, greedy = torch.tensor([question]), {"do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, **greedy)
        answer = whole[0, len(question) :].tolist()
        return question, tokenizer.decode(answer, skip_special_tokens=True), answer[-1] != tokenizer.eos_token_id

    return write


def test_records_hold_what_transformers_writes_and_rewards_what_it_says(
    judged_run: Path, written_by_transformers: Callable[..., tuple[list[int], str, bool]]
) -> None:
    found = records(judged_run, "step_1")
    assert len(found) == 8 * 4
    scores, too_long = [], []
    for record in found:
        question, text, cut = written_by_transformers(record)
        (answer,) = record["judge"]
        matches = list(re.finditer("[0-9]", text))
        expected: float | None = float(matches[-1][0]) if matches else None
        if matches and cut and matches[-1].end() == len(text):
            expected = None
        too_long.append(len(question) > QUESTION_TOKENS)
        if too_long[-1]:
            text, expected = "", None
            assert f"judge.max_prompt_tokens is {QUESTION_TOKENS}" in answer["error"]
        assert answer["text"] == text
        assert answer["score"] == expected
        scores.append(-3 if expected is None else expected)
        share = sum(c.isdigit() for c in record["response"]) / max(len(record["response"]), 1)
        assert record["scores"] == {"judge": scores[-1]}
        assert record["reward"] == pytest.approx(0.5 * share + 0.25 * scores[-1], abs=1e-6)
        assert record["accuracy"] == float(share > 0.4)
    # Every kind of answer occurs; otherwise parts of the checks above did not run.
    assert len(set(scores) - {-3}) > 1
    assert scores.count(-3) > sum(too_long) > 0
    row = metrics(judged_run)[1]
    assert row["reward/judge"] == pytest.approx(sum(scores) / len(scores))
    assert row["judge/unparsable_fraction"] == scores.count(-3) / len(scores)
    assert row["judge/too_long_fraction"] == sum(too_long) / len(scores)


def test_validation_is_judged_as_well(
    judged_run: Path, written_by_transformers: Callable[..., tuple[list[int], str, bool]]
) -> None:
    found = records(judged_run, "val_step_1")
    assert len(found) == 16
    for record in found:
        question, text, _ = written_by_transformers(record)
        assert record["judge"][0]["text"] == (text if len(question) <= QUESTION_TOKENS else "")
    assert not list((judged_run / "rollouts").glob(".*"))


@contextlib.contextmanager
def vllm_server(model: Path) -> Iterator[str]:
    """Address of a running vLLM server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", str(QUESTION_TOKENS + ANSWER_TOKENS), "--served-model-name", "the-judge"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": "a secret"}
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 240
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None, "vLLM's server ended"
            assert time.monotonic() < until, "vLLM's server does not listen"
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()  # SIGKILL would leave its shared memory behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.on_demand
def test_judges_on_vllm_server_and_sglang_write_the_same_answers(
    task: Path, judge: Path, judged_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = f"judge.parser={task.parent / 'parser.py'}:last_digit"
    monkeypatch.setenv("JUDGE_KEY", "a secret")
    with vllm_server(judge) as url:
        own = ("judge.num_engines", "judge.kv_cache_gib")
        server = (f"judge.url={url}", f"judge.tokenizer_path={judge}", "judge.api_key_variable=JUDGE_KEY")
        train(task, tmp_path / "server", *(each for each in OVERRIDES if not each.startswith(own)), parser, *server)
    train(task, tmp_path / "sglang", *OVERRIDES, parser, f"judge.hf_path={judge}", "judge.engine=sglang")
    for directory in (tmp_path / "server", tmp_path / "sglang"):
        for name in ("step_1", "val_step_1"):
            assert records(directory, name) == records(judged_run, name)
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
