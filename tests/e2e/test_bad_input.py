"""User errors: one clear message on stderr, exit code 2, no traceback, no files written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.cli import main
from tests.e2e.runs import write_task
from tests.tiny_models import write_tiny_classifier


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid task; every test makes one thing in it invalid."""
    return write_task(tmp_path_factory.mktemp("base"))


@pytest.fixture
def refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `train` with overrides, checks that it is rejected, and returns the message."""

    def run(*overrides: str) -> str:
        capsys.readouterr()
        code = main(["train", str(base), f"run.dir={tmp_path / 'run'}", *overrides])
        error = capsys.readouterr().err.strip()
        assert code == 2, error
        assert error.startswith("error: ")
        assert "Traceback" not in error
        assert len(error.splitlines()) == 1, error
        assert not (tmp_path / "run").exists()
        return error

    return run


def model_with(base: Path, tmp_path: Path, **changes: object) -> str:
    """Copy the task's model directory, with a changed config.json."""
    directory = tmp_path / "model"
    shutil.copytree(base.parent / "model", directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return str(directory)


def truncate(directory: str | Path) -> None:
    shard = Path(directory, "model.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])


def rows(tmp_path: Path, text: str) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return str(path)


SFT = "algorithm.policy_loss.name=sft algorithm.policy_loss.clip_high=null"
LORA = "actor.lora.rank=4"
JUDGE = "judge.hf_path={model} judge.template='{prompt}{response}='"
SMALL_JUDGE = f"{JUDGE} judge.max_prompt_tokens=60 judge.max_response_tokens=20"
SETTINGS = {
    "actor.mtp_loss_coefficient=0.1": (
        "error: actor.mtp_loss_coefficient=0.1, but model.hf_path=",
        "has no multi-token-prediction layers",
    ),
    "rollout.samples_per_promt=4": ("did you mean rollout.samples_per_prompt?",),
    "data.train=nowhere.jsonl": ("data.train", "nowhere.jsonl"),
    "model.hf_path={tmp}": ("config.json",),
    "actor.parallel.ep=3 cluster.gpus_per_node=3": ("actor.parallel.ep",),
    "actor.parallel.tp=2 actor.parallel.pp=2": ("does not divide the 2 trainer ranks", "cluster.gpus_per_node"),
    "run.dir=/proc/mcore_rl/run": ("run.dir",),  # read-only for everybody, root included
    "algorithm.policy_loss.name=ppo": ("ppo_clip",),
    "algorithm.advantage=grop": ("grpo",),
    "algorithm.loss_aggregation=mean": ("token-mean",),
    "algorithm.kl.in_loss=0.1 reference.hf_path=/nowhere": ("reference.hf_path=/nowhere: no config.json",),
    f"algorithm.kl.in_loss=0.1 {SFT}": ("algorithm.kl.in_loss and algorithm.kl.in_reward to 0",),
    "reward_model.hf_path={model}": (
        "error: reward_model.hf_path={model}: score.weight is missing",
        "set reward_model.hf_path to a sequence classification checkpoint with one label",
    ),
    f"reward_model.hf_path={{model}} {SFT}": ("algorithm.policy_loss.name=sft is supervised",),
    f"{SMALL_JUDGE} judge.score_pattern=(1": ("judge.score_pattern=(1 is not a regular expression",),
    f"{SMALL_JUDGE} judge.parser=/nowhere.py:f": ("judge.parser=/nowhere.py:f: there is no file",),
    f"{SMALL_JUDGE} judge.tokenizer_path={{tmp}}": ("judge.tokenizer_path: {tmp} contains no",),
    f"{SMALL_JUDGE} {SFT}": ("sft samples no responses; set it to null",),
    JUDGE: ("judge.max_prompt_tokens + judge.max_response_tokens = 4608 exceeds",),
    f"{JUDGE} judge.max_prompt_tokens=5 judge.max_response_tokens=20": (
        "judge.max_prompt_tokens=5: judge.template with the longest prompt of data.train takes",
    ),
    "reward.function=none": ("judge.hf_path",),
    "trainer.export_hf={model}": ("trainer.export_hf",),
    f"{LORA} actor.lora.target_modules=[q_proj,gate_proj]": (
        "actor.lora.target_modules=['q_proj', 'gate_proj']: gate_proj: only routed experts have it",
        "choose from q_proj, k_proj, v_proj, o_proj",
    ),
    f"{LORA} actor.lora.path=/nowhere": ("actor.lora.path=/nowhere: /nowhere/adapter_config.json does not exist",),
    f"{LORA} trainer.export_adapter={{model}}": ("trainer.export_adapter",),
    "observe.trackers=wandbb": ("observe.trackers=['wandbb'] must be one of tensorboard, wandb",),
    "observe.trackers=[mlflow]": ("error: observe.trackers: mlflow is not", "leave mlflow out of observe.trackers"),
    "observe.prometheus_port=9400 observe.prometheus_host=192.0.2.1": ("observe.prometheus_host=192.0.2.1",),
    f"{LORA} model.random_init=true": ("model.random_init=True is not supported with actor.lora.rank=4",),
}
"""Overrides -> parts of the message. {model}: the task's model; {tmp}: a directory without a model."""


def test_invalid_setting_is_refused_by_name(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    def filled(text: str) -> str:
        return text.replace("{model}", str(base.parent / "model")).replace("{tmp}", str(tmp_path))

    for overrides, parts in SETTINGS.items():
        message = refused(*filled(overrides).split())
        assert not [part for part in parts if filled(part) not in message], message


SOURCES = (
    '{"question": "1+1=", "answer": "2", "data_source": "openai/gsm8k"}\n'
    '{"question": "1+2=", "answer": "3", "data_source": "sums"}\n'
    '{"question": "1+3=", "answer": "4"}\n'
)


def test_invalid_data_is_refused_by_file_and_line(refused: Callable[..., str], tmp_path: Path) -> None:
    path = rows(tmp_path, "")
    assert "no rows" in refused(f"data.val={path}")
    for line in ('{"prompt": "1+1="', '{"prompt": 7, "answer": "1"}', '{"answer": "1"}', "[]"):
        rows(tmp_path, '{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
        message = refused(f"data.train={path}")
        assert path in message
        assert "line 2" in message or ":2" in message
    rows(tmp_path, json.dumps({"prompt": "1+" * 40, "answer": "2"}) + "\n")
    assert "raise rollout.max_prompt_tokens" in refused(f"data.train={path}")
    rows(tmp_path, SOURCES)
    assert refused("reward.function=by_data_source", f"data.train={path}").startswith(
        f"error: data.train={path}: the data_source 'sums' of 1 rows has no grader with "
        "reward.function=by_data_source; set reward.functions to {sums: module_or_file.py:function}, or to one of"
    )
    message = refused("reward.function=by_data_source", "reward.functions.sums=math", f"data.train={path}")
    assert "the data_source 'unknown' (the default for rows without one) of 1 rows has no grader" in message
    message = refused("algorithm.per_source=[{source: summs, weight: 2}]", f"data.train={path}")
    assert "algorithm.per_source, summs: data.train has no row with this data_source; it has: openai/gsm8k," in message
    message = refused("algorithm.per_source=[{source: sums, advantage: gae}]", f"data.train={path}")
    assert "algorithm.per_source, sums: estimators by source need rewards of responses only" in message


ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    ENDLESS: "did not end within 2 seconds",
    "{{ 'a' * 10 ** 13 }}": "needs more than 2048 MiB of memory",
    "{% for %}": "is not valid Jinja: line 1",
    "{{ raise_exception('one\ntwo') }}": "line 1: the tokenizer's chat template rejects the prompt: one two",
    "{{ messages | length }}": "line 1: the tokenizer's chat template drops or changes message 1",
}


def test_invalid_chat_template_is_refused_with_its_line(
    refused: Callable[..., str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_rl.data.chat.limits.MAX_SECONDS", 2.0)
    directory = model_with(base, tmp_path)
    for template, problem in TEMPLATES.items():
        Path(directory, "chat_template.jinja").write_text(template)
        assert problem in refused(f"model.hf_path={directory}", "data.template=chat")


def test_invalid_model_directory_is_refused(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    message = refused(f"model.hf_path={model_with(base, tmp_path, model_type='gpt2')}")
    assert "gpt2" in message
    assert "qwen3_moe" in message
    directory = model_with(base, tmp_path, model_type="deepseek_v4")
    assert f"reward_model.hf_path={directory}: model_type 'deepseek_v4'" in refused(f"reward_model.hf_path={directory}")
    model_with(base, tmp_path, num_hidden_layers=1)
    message = refused("algorithm.kl.in_loss=0.1", f"reference.hf_path={directory}")
    assert f"reference.hf_path={directory} has another architecture than model.hf_path" in message
    model_with(base, tmp_path, num_hidden_layers=5)
    assert "model.layers.4" in refused(f"model.hf_path={directory}")
    judge = ["judge.template='{prompt}{response}='", "judge.max_prompt_tokens=60", "judge.max_response_tokens=20"]
    message = refused(f"judge.hf_path={directory}", *judge)
    assert message.startswith(f"error: judge.hf_path={directory}: ")
    assert "model.layers.4" in message
    model_with(base, tmp_path)
    truncate(directory)
    message = refused(f"model.hf_path={directory}")
    assert "model.safetensors" in message
    assert "truncated" in message
    message = refused("algorithm.kl.in_reward=0.1", f"reference.hf_path={directory}")
    assert message.startswith(f"error: reference.hf_path={directory}: ")
    assert "truncated" in message


def test_full_disk_is_refused(refused: Callable[..., str], small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("64k")
    assert "run.dir" in refused(f"run.dir={disk / 'run'}")
    assert not list(disk.rglob("*.yaml"))


@pytest.mark.parametrize(
    ("text", "cause"), [("import nothing_of_this_name\n", "nothing_of_this_name"), ("def other(): ...\n", "digits")]
)
def test_reward_file_that_does_not_import(refused: Callable[..., str], tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    message = refused(f"reward.function={tmp_path}/mine.py:digits")
    assert "reward.function" in message
    assert cause in message


def test_reward_function_that_grades_nothing_is_refused_with_its_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def f(**given):\n    return given['solution']\n")
    code = main(["train", str(base), f"run.dir={tmp_path / 'run'}", f"reward.function={tmp_path}/mine.py:f"])
    error = capsys.readouterr().err.strip()
    assert code == 2, error
    assert error.startswith(
        f"error: reward.function={tmp_path}/mine.py:f cannot grade the first prompt of data.train: "
    )
    assert f'File "{tmp_path}/mine.py", line 2, in f' in error
    assert error.endswith("KeyError: 'solution'\n(see docs/rewards.md)")
    assert not (tmp_path / "run").exists()


def test_a_reward_model_that_does_not_fit(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = write_tiny_classifier(tmp_path / "classifier", "qwen3", vocab_size=40)
    path = f"reward_model.hf_path={directory}"
    assert "reward_model.parallel.ep=2" in refused(path, "reward_model.parallel.ep=2")
    assert "reward_model.moe.aux_loss_coefficient" in refused(path, "reward_model.moe.aux_loss_coefficient=0.1")
    assert refused(path).startswith("error: reward_model.hf_path: ")  # no tokenizer
    tokenizer = AutoTokenizer.from_pretrained(base.parent / "model")
    tokenizer.add_tokens([f"<{i}>" for i in range(20)])
    tokenizer.save_pretrained(directory)
    assert "the model has vocab_size=40" in refused(path)
    tokenizer = AutoTokenizer.from_pretrained(base.parent / "model")
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    tokenizer.save_pretrained(directory)
    assert "data.train, row 0: reward_model: the tokenizer's chat template rejects" in refused(path)
    truncate(directory)
    assert "truncated" in refused(path)


def test_a_wrong_command_line_exits_with_2_as_well() -> None:
    command = [sys.executable, "-m", "mcore_rl.cli"]
    for arguments in ([], ["trian"], ["train"]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert subprocess.run([*command, "train", "--help"], capture_output=True, check=False).returncode == 0
