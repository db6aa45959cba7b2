"""`mcore-rl serve` of a trained run: its engines die, requests wait and continue, and all answers are transformers'."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest

from tests.e2e.runs import ENGINE, TrainProcess

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


def expected(exported: Path) -> dict[str, str]:
    """Return transformers' greedy continuations of the texts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer, found = AutoTokenizer.from_pretrained(exported), {}
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
        found[text] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def test_requests_continue_though_engines_die(whole_run: Path, tmp_path: Path) -> None:
    """The run directory has moved. The first requests arrive before the engines have weights; others while engines are
    suspended, one of which is killed, and while there is no engine."""
    run_dir, answers = tmp_path / "moved", expected(whole_run.parent / "exported")
    shutil.copytree(whole_run, run_dir)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(whole_run.parent / "exported", tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    (tokenizer / "chat_template.jinja").write_text(template)
    overrides = (f"model.tokenizer_path={tokenizer}", "rollout.num_engines=2", "rollout.max_engine_restarts=3")
    with ServeProcess(run_dir, run_dir, overrides) as server, ThreadPoolExecutor(32) as threads:
        client = server.client()

        def ask(text: str) -> str:
            done = client.completions.create(model="any", prompt=text, temperature=0, max_tokens=12)
            return done.choices[0].text

        def asked() -> dict[str, Future[str]]:
            return {text: threads.submit(ask, text) for text in TEXTS}

        def check(given: dict[str, Future[str]]) -> None:
            assert {text: reply.result(180) for text, reply in given.items()} == answers

        early, ended = asked(), threading.Event()
        assert "serving the weights" not in server.text()
        check(early)

        def always() -> int:
            """Ask until the test ends, also while weights are published."""
            count = 0
            while not ended.is_set():
                assert ask(TEXTS[count % len(TEXTS)]) == answers[TEXTS[count % len(TEXTS)]]
                count += 1
            return count

        throughout = threads.submit(always)
        server.wait_until(lambda: "serving the weights of step 4" in server.text())
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
