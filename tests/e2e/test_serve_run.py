"""`mcore-rl serve`: its engines die, requests wait and continue, and all answers equal transformers'."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
import yaml

from tests.e2e.runs import ENGINE, ONE_RANK, TrainProcess
from tests.e2e.test_gateway_run import TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]

TEXTS = ("1+2=", "30*4", "7", "99-1")


@dataclass
class ServeProcess(TrainProcess):
    """An `mcore-rl serve` process of the run directory `config`."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "mcore_rl.cli", "serve", str(self.config)]

    def client(self) -> openai.OpenAI:
        """Return a client, as soon as the server listens. Its requests are not repeated."""
        file = self.run_dir / "gateways.json"
        self.wait_until(file.exists)
        (address,) = json.loads(file.read_text())
        return openai.OpenAI(base_url=f"{address['url']}/v1", api_key=address["token"], max_retries=0, timeout=180)

    def engines(self) -> list[psutil.Process]:
        """Wait for the two engines."""
        engines: list[psutil.Process] = self.wait_until(
            lambda: found if len(found := self.processes(ENGINE)) == 2 else []
        )
        return engines


def write_tokenizer(model: Path, directory: Path) -> str:
    """Write the tokenizer of a model with a chat template; return the override that uses it."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return f"model.tokenizer_path={directory}"


def ask(client: openai.OpenAI, text: str) -> str:
    done = client.completions.create(model="any", prompt=text, temperature=0, max_tokens=12)
    return done.choices[0].text


def expected(model_dir: Path) -> dict[str, str]:
    """Return transformers' greedy continuations of the texts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer, found = AutoTokenizer.from_pretrained(model_dir), {}
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
        found[text] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def test_checkpoint_of_a_moved_run_is_served(whole_run: Path, tmp_path: Path) -> None:
    """In another layout. The data and the reward function of the run need not exist."""
    run_dir, exported = tmp_path / "moved", whole_run.parent / "exported"
    shutil.copytree(whole_run, run_dir)
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace("train.jsonl", "gone.jsonl").replace("reward.py", "gone.py"))
    overrides = (*ONE_RANK, write_tokenizer(exported, tmp_path / "tokenizer"))
    with ServeProcess(run_dir / "checkpoints" / "step_4", run_dir, overrides) as server:
        client = server.client()
        assert {text: ask(client, text) for text in TEXTS} == expected(exported)
        assert "serving the weights of step 4" in server.text()
        server.process.send_signal(signal.SIGINT)
        assert server.finish() == 0
        assert not server.left_after(30)


def test_requests_continue_though_engines_die(task: Path, tmp_path: Path) -> None:
    """The first requests arrive before the engines have weights; others while engines are suspended, one of which is
    killed, and while there is no engine."""
    run_dir, model = tmp_path / "run", Path(yaml.safe_load(task.read_text())["model"]["hf_path"])
    answers, tokenizer = expected(model), write_tokenizer(model, tmp_path / "tokenizer")
    overrides = (*ONE_RANK, f"run.dir={run_dir}", tokenizer, "rollout.num_engines=2", "cluster.gpus_per_node=2")
    with ServeProcess(task, run_dir, overrides) as server, ThreadPoolExecutor(32) as threads:
        client = server.client()

        def asked() -> dict[str, Future[str]]:
            return {text: threads.submit(ask, client, text) for text in TEXTS}

        def check(given: dict[str, Future[str]]) -> None:
            assert {text: reply.result(180) for text, reply in given.items()} == answers

        early, ended = asked(), threading.Event()
        assert "serving the weights" not in server.text()
        check(early)

        def always() -> int:
            """Ask until the test ends, also while weights are published."""
            count = 0
            while not ended.is_set():
                assert ask(client, TEXTS[count % len(TEXTS)]) == answers[TEXTS[count % len(TEXTS)]]
                count += 1
            return count

        throughout = threads.submit(always)
        server.wait_until(lambda: "serving the weights of step 0" in server.text())
        engines = server.engines()
        for engine in engines:
            engine.suspend()
        amid = [asked() for _ in range(2)]
        server.wait_until(lambda: threads._work_queue.empty())
        engines[0].kill()
        engines[1].resume()
        for given in amid:
            check(given)
        server.wait_until(lambda: "is up again" in server.text())
        check(asked())

        engines = server.engines()
        for engine in engines:
            engine.kill()
        check(asked())  # there is no engine
        server.wait_until(lambda: server.text().count("is up again") == 3)
        assert "(3 of 3 times)" in server.text()
        ended.set()
        assert throughout.result(180) > 100
        server.engines()[0].kill()
        assert server.finish() == 1
        assert "rollout engine" in server.text()
        assert "(rollout.max_engine_restarts=3)" in server.text()
        assert "Traceback" not in server.text()
        assert not server.left_after(30)
    assert not (run_dir / "journals").exists()
    assert not (run_dir / "gateways.json").exists()
