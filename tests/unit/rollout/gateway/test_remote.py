"""Workers outside the run: `mcore-rl harness-worker` and commands without a sandbox."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl import cli
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.exchange import OpenedSession
from mcore_rl.rollout.gateway.harness import process
from mcore_rl.rollout.gateway.harness.process import TOKEN, ProcessHarness
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.rollout.gateway.server import GatewayServer
from mcore_rl.rollout.gateway.serving import ServedRequests
from mcore_rl.rollout.gateway.wire import FILE
from tests.unit.rollout.episodes.scripted import END

SESSION = OpenedSession("s1", "key", "owner", {"question": "how much?"})
ASKS = """
import json, os, sys, urllib.request
row = json.load(open("row.json"))
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps({"model": "m", "messages": row["messages"]}).encode(), headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
print(os.environ.get("MCORE_RL_GATEWAY_TOKEN", "no token"))
sys.exit(3)
"""


def ran(command: str) -> dict[str, Any]:
    finished = asyncio.run(ProcessHarness(command).run(SESSION, "http://gateway/sessions/s1"))
    assert finished.error is None, finished.error
    return dict(finished.extra)


def test_killed_command_has_the_exit_code_of_its_signal() -> None:
    assert ran("sh -c 'echo before; kill -9 $$'") == {"exit_code": 137, "stdout": "before\n", "stderr": ""}


def test_command_that_floods_is_read_to_its_end() -> None:
    found = ran("sh -c 'yes | head -c 50000000; head -c 3000000 /dev/zero >&2; exit 4'")
    assert found["exit_code"] == 4
    assert (len(found["stdout"]), len(found["stderr"])) == (process.MAX_OUTPUT_BYTES, process.MAX_OUTPUT_BYTES)


def test_command_ends_without_the_processes_that_it_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first one is killed with the command's group; the second has a group of its own, and keeps the output."""
    monkeypatch.setattr(process, "DRAIN_SECONDS", 0.5)
    pid = tmp_path / "pid"
    outside = f'setsid sh -c "echo \\$\\$ > {pid}; exec sleep 60"'
    assert ran(f"sh -c '(sleep 60) & {outside} & while [ ! -s {pid} ]; do :; done; echo done'") == {
        "exit_code": 0,
        "stdout": "done\n",
        "stderr": "",
    }
    left = psutil.Process(int(pid.read_text()))
    assert left.is_running()
    left.kill()


def test_command_that_is_no_program_ends_its_session() -> None:
    finished = asyncio.run(ProcessHarness("/nowhere/agent").run(SESSION, "http://gateway"))
    assert finished.error is not None
    assert finished.error.startswith("the command did not start: ")


@pytest.mark.parametrize("by_url", [True, False])
def test_worker_plays_sessions_until_its_gateway_ends(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_url: bool
) -> None:
    monkeypatch.setattr("mcore_rl.rollout.gateway.harness.worker.LOST_SECONDS", 0.5)
    (tmp_path / "asks.py").write_text(ASKS)
    codes: list[int] = []
    with GatewayServer("tiny", "127.0.0.1", 0, "127.0.0.1") as server:
        address = server.address
        (tmp_path / FILE).write_text(json.dumps([{"url": address.url, "token": address.token}]))
        monkeypatch.setenv(TOKEN, address.token)
        where = address.url if by_url else str(tmp_path)
        arguments = ["harness-worker", where, "--command", f"python3 {tmp_path}/asks.py"]
        thread = threading.Thread(target=lambda: codes.append(cli.main(arguments)))
        thread.start()
        episode = GatewayEpisode(RolloutConfig())
        set_up = stage(lambda text: f"well{END}", episode)
        episode.link = set_up.player.run(
            GatewayLink.connect(address, ServedRequests(set_up.player, episode, episode.rollout))
        )
        (outcome,) = set_up.play()
        set_up.player.run(episode.link.close())
    thread.join(30)
    assert outcome.error is None, outcome.error
    assert outcome.extra["harness"] == {"exit_code": 3, "stdout": "well\nno token\n", "stderr": ""}
    assert codes == [0]
    assert "1 sessions done; the gateway at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gateway", "options", "message"),
    [
        ("http://127.0.0.1:9", ("--command", "x"), "set the environment variable MCORE_RL_GATEWAY_TOKEN"),
        ("absent", ("--command", "x"), r"gateways\.json does not exist: no run with rollout\.episode=gateway"),
        ("absent", (), "name the program of each session with either --function or --command"),
        ("absent", ("--command", "x", "--function", "a:b"), "with either --function or --command"),
        ("absent", ("--command", "'x"), "is not a valid command"),
        ("absent", ("--command", "x", "--concurrent", "0"), "--concurrent 0 must be at least 1"),
    ],
)
def test_worker_without_gateway_or_program_is_refused(
    gateway: str,
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert cli.main(["harness-worker", gateway, *options]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
