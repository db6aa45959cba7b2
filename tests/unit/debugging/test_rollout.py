"""`debug rollout` rejects runs that it cannot generate for, and shows batches whose grading failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from mcore_rl.config.schema import Config
from mcore_rl.debugging.rollout import STEP, check_supported, collect, show_records
from mcore_rl.errors import ConfigError, RewardError
from mcore_rl.types import Groups


def config(device: str = "cpu") -> Config:
    made = Config()
    made.cluster.device = device
    return made


def test_check_supported_random_weights_are_rejected() -> None:
    made = config()
    made.model.random_init = True
    with pytest.raises(ConfigError, match=r"^model\.random_init=true: .* set it to false$"):
        check_supported(made)


def test_check_supported_adapter_to_start_from_is_rejected() -> None:
    made = config()
    made.actor.lora.path = "adapter"
    # Without a rank there are no adapters, and validation reports the key.
    check_supported(made)
    made.actor.lora.rank = 8
    with pytest.raises(ConfigError, match=r"^actor\.lora\.path=adapter: "):
        check_supported(made)
    # Fresh adapters do not change the model.
    made.actor.lora.path = None
    check_supported(made)


def test_check_supported_models_need_gpus_of_ranks() -> None:
    for device in ("cpu", "cuda"):
        made = config(device)
        made.judge.hf_path, made.reward_model.hf_path = "judge", "scorer"
        if device == "cpu":
            check_supported(made)
        else:
            with pytest.raises(ConfigError, match=r"^reward_model\.hf_path and judge\.hf_path: "):
                check_supported(made)
    made = config("cuda")
    made.judge.url = "http://judge/v1"
    check_supported(made)


class FailingCollector:
    """Collector whose batch has too many grading failures."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def collect(self, step: int) -> Groups:
        self.steps.append(step)
        raise RewardError("reward.function failed on 4 of 4 responses")


def test_collect_failed_grading_is_returned_for_later() -> None:
    collector = FailingCollector()
    error = collect(collector)
    assert isinstance(error, RewardError)
    # The first step of a run: same prompts and seeds.
    assert collector.steps == [STEP] == [1]


def test_show_records_names_the_file_and_damaged_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rollouts" / "step_1.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"group": 0, "sample": 0, "response": "a\x1b[2J"}) + "\nno json\n")
    show_records(path, Console(highlight=False, width=40))
    lines = capsys.readouterr().out.splitlines()
    assert "    response: aU+001B[2J" in lines
    assert lines[-2:] == [
        "rollouts/step_1.jsonl: lines that are not JSON objects are left out (1)",
        f"all responses: {path}",
    ]
