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

    def run(*overrides: str, run_dir: str | None = None) -> str:
        directory = run_dir or str(tmp_path / "run")
        code = main(["train", str(base), f"run.dir={directory}", *overrides])
        error = capsys.readouterr().err.strip()
        assert code == 2, error
        assert error.startswith("error: ")
        assert "Traceback" not in error
        assert len(error.splitlines()) == 1, error
        if run_dir is None:
            assert not (tmp_path / "run").exists()
        return error

    return run


def model_with(base: Path, tmp_path: Path, **changes: object) -> str:
    """Copy the task's model directory, with a changed config.json."""
    directory = tmp_path / "model"
    shutil.copytree(base.parent / "model", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return str(directory)


def rows(tmp_path: Path, text: str) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return str(path)


def test_multi_token_prediction_of_a_model_without_it(refused: Callable[..., str]) -> None:
    message = refused("actor.mtp_loss_coefficient=0.1")
    assert message.startswith("error: actor.mtp_loss_coefficient=0.1, but model.hf_path=")
    assert "has no multi-token-prediction layers" in message


def test_unknown_key(refused: Callable[..., str]) -> None:
    assert "did you mean rollout.samples_per_prompt?" in refused("rollout.samples_per_promt=4")


def test_missing_data_file(refused: Callable[..., str]) -> None:
    assert "data.train" in (message := refused("data.train=nowhere.jsonl"))
    assert "nowhere.jsonl" in message


def test_empty_data_file(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no rows" in refused(f"data.val={rows(tmp_path, '')}")


@pytest.mark.parametrize("line", ['{"prompt": "1+1="', '{"prompt": 7, "answer": "1"}', '{"answer": "1"}', "[]"])
def test_malformed_row_is_named_by_file_and_line(refused: Callable[..., str], tmp_path: Path, line: str) -> None:
    path = rows(tmp_path, '{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
    message = refused(f"data.train={path}")
    assert path in message
    assert "line 2" in message or ":2" in message


def test_prompts_longer_than_the_limit(refused: Callable[..., str], tmp_path: Path) -> None:
    path = rows(tmp_path, json.dumps({"prompt": "1+" * 40, "answer": "2"}) + "\n")
    assert "raise rollout.max_prompt_tokens" in refused(f"data.train={path}")


def test_model_directory_without_config(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "config.json" in refused(f"model.hf_path={tmp_path}")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
            "did not end within 2 seconds",
        ),
        ("{{ 'a' * 10 ** 13 }}", "needs more than 2048 MiB of memory"),
        ("{% for %}", "is not valid Jinja: line 1"),
        ("{{ raise_exception('one\ntwo') }}", "line 1: the tokenizer's chat template rejects the prompt: one two"),
        ("{{ messages | length }}", "line 1: the tokenizer's chat template drops or changes message 1"),
    ],
)
def test_chat_template_that_cannot_be_used(
    refused: Callable[..., str],
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    problem: str,
) -> None:
    monkeypatch.setattr("mcore_rl.data.chat.limits.MAX_SECONDS", 2.0)
    directory = model_with(base, tmp_path)
    Path(directory, "chat_template.jinja").write_text(template)
    assert problem in refused(f"model.hf_path={directory}", "data.template=chat")


def test_unsupported_model_type(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    message = refused(f"model.hf_path={model_with(base, tmp_path, model_type='gpt2')}")
    assert "gpt2" in message
    assert "qwen3_moe" in message


def test_truncated_shard(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    directory = model_with(base, tmp_path)
    shard = Path(directory, "model.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "model.safetensors" in (message := refused(f"model.hf_path={directory}"))
    assert "truncated" in message


def test_missing_tensor(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    directory = model_with(base, tmp_path, num_hidden_layers=5)
    assert "model.layers.4" in refused(f"model.hf_path={directory}")


def test_experts_that_ep_does_not_divide(refused: Callable[..., str]) -> None:
    assert "actor.parallel.ep" in refused("actor.parallel.ep=3", "cluster.gpus_per_node=3")


def test_more_ranks_than_the_cluster_offers(refused: Callable[..., str]) -> None:
    message = refused("actor.parallel.tp=2", "actor.parallel.pp=2")
    assert "does not divide the 2 trainer ranks" in message
    assert "cluster.gpus_per_node" in message


def test_run_dir_that_cannot_be_written(refused: Callable[..., str]) -> None:
    assert "run.dir" in refused(run_dir="/proc/mcore_rl/run")  # read-only for everybody, root included


def test_full_disk(refused: Callable[..., str], small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("64k")
    assert "run.dir" in refused(run_dir=str(disk / "run"))
    assert not list(disk.rglob("*.yaml"))


@pytest.mark.parametrize(
    ("text", "cause"), [("import nothing_of_this_name\n", "nothing_of_this_name"), ("def other(): ...\n", "digits")]
)
def test_reward_file_that_does_not_import(refused: Callable[..., str], tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    message = refused(f"reward.function={tmp_path}/mine.py:digits")
    assert "reward.function" in message
    assert cause in message


def test_rows_that_name_no_grader(refused: Callable[..., str], tmp_path: Path) -> None:
    path = rows(
        tmp_path,
        '{"question": "1+1=", "answer": "2", "data_source": "openai/gsm8k"}\n'
        '{"question": "1+2=", "answer": "3", "data_source": "sums"}\n'
        '{"question": "1+3=", "answer": "4"}\n',
    )
    assert refused("reward.function=by_data_source", f"data.train={path}").startswith(
        f"error: data.train={path}: the data_source 'sums' of 1 rows has no grader with "
        "reward.function=by_data_source; set reward.functions to {sums: module_or_file.py:function}, or to one of"
    )
    message = refused("reward.function=by_data_source", "reward.functions.sums=math", f"data.train={path}")
    assert "the data_source 'unknown' (the default for rows without one) of 1 rows has no grader" in message


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
    assert error.endswith("KeyError: 'solution'")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "known"),
    [
        ("algorithm.policy_loss.name=ppo", "ppo_clip"),
        ("algorithm.advantage=grop", "grpo"),
        ("algorithm.loss_aggregation=mean", "token-mean"),
    ],
)
def test_unknown_names_of_the_algorithm_list_the_known(refused: Callable[..., str], override: str, known: str) -> None:
    assert known in refused(override)


SFT = ["algorithm.policy_loss.name=sft", "algorithm.policy_loss.clip_high=null"]


def test_a_reference_that_is_another_model_or_none(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    kl = "algorithm.kl.in_loss=0.1"
    assert "reference.hf_path=/nowhere: no config.json" in refused(kl, "reference.hf_path=/nowhere")
    other = model_with(base, tmp_path, num_hidden_layers=1)
    message = refused(kl, f"reference.hf_path={other}")
    assert f"reference.hf_path={other} has another architecture than model.hf_path" in message
    assert "algorithm.kl.in_loss and algorithm.kl.in_reward to 0" in refused(kl, *SFT)


def test_a_reference_that_is_not_whole(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    directory = model_with(base, tmp_path)
    shard = Path(directory, "model.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    message = refused("algorithm.kl.in_reward=0.1", f"reference.hf_path={directory}")
    assert message.startswith(f"error: reference.hf_path={directory}: ")
    assert "truncated" in message


def test_a_reward_model_that_has_no_score(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    policy = base.parent / "model"
    message = refused(f"reward_model.hf_path={policy}")
    assert message.startswith(f"error: reward_model.hf_path={policy}: score.weight is missing")
    assert "set reward_model.hf_path to a sequence classification checkpoint with one label" in message
    assert "algorithm.policy_loss.name=sft is supervised" in refused(f"reward_model.hf_path={policy}", *SFT)
    unknown = model_with(base, tmp_path, model_type="gpt_oss")
    assert f"reward_model.hf_path={unknown}: model_type 'gpt_oss'" in refused(f"reward_model.hf_path={unknown}")


@pytest.fixture(scope="module")
def classifier(base: Path) -> Path:
    return write_tiny_classifier(base.parent / "classifier", "qwen3", vocab_size=40)


def test_a_reward_model_that_does_not_fit(
    classifier: Path, refused: Callable[..., str], base: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    directory = shutil.copytree(classifier, tmp_path / "classifier")
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
    shard = Path(directory, "model.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "truncated" in refused(path)


def test_a_judge_that_cannot_work(refused: Callable[..., str], base: Path, tmp_path: Path) -> None:
    given = [f"judge.hf_path={base.parent / 'model'}", "judge.template='{prompt}{response}='"]
    small = ["judge.max_prompt_tokens=60", "judge.max_response_tokens=20"]
    assert "judge.score_pattern=(1 is not a regular expression" in refused(*given, *small, "judge.score_pattern=(1")
    assert "judge.parser=/nowhere.py:f: there is no file" in refused(*given, *small, "judge.parser=/nowhere.py:f")
    assert "judge.max_prompt_tokens + judge.max_response_tokens = 4608 exceeds" in refused(*given)
    message = refused(*given, "judge.max_prompt_tokens=5", "judge.max_response_tokens=20")
    assert "judge.max_prompt_tokens=5: judge.template with the longest prompt of data.train takes" in message
    assert f"judge.tokenizer_path: {tmp_path} contains no" in refused(
        *given, *small, f"judge.tokenizer_path={tmp_path}"
    )
    assert "sft samples no responses; set it to null" in refused(*given, *small, *SFT)
    directory = model_with(base, tmp_path, num_hidden_layers=5)
    message = refused(f"judge.hf_path={directory}", given[1], *small)
    assert message.startswith(f"error: judge.hf_path={directory}: ")
    assert "model.layers.4" in message
    assert "judge.hf_path" in refused("reward.function=none")


def test_an_export_that_would_overwrite(refused: Callable[..., str], base: Path) -> None:
    assert "trainer.export_hf" in refused(f"trainer.export_hf={base.parent / 'model'}")


def test_adapters_that_the_model_cannot_have(refused: Callable[..., str], base: Path) -> None:
    lora = "actor.lora.rank=4"
    message = refused(lora, "actor.lora.target_modules=[q_proj,gate_proj]")
    assert "actor.lora.target_modules=['q_proj', 'gate_proj']: gate_proj: only routed experts have it" in message
    assert "choose from q_proj, k_proj, v_proj, o_proj" in message
    assert "actor.lora.path=/nowhere: /nowhere/adapter_config.json does not exist" in refused(
        lora, "actor.lora.path=/nowhere"
    )
    assert "trainer.export_adapter" in refused(lora, f"trainer.export_adapter={base.parent / 'model'}")
    assert "model.random_init=True is not supported with actor.lora.rank=4" in refused(lora, "model.random_init=true")


def test_a_wrong_command_line_exits_with_2_as_well() -> None:
    command = [sys.executable, "-m", "mcore_rl.cli"]
    for arguments in ([], ["trian"], ["train"]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert subprocess.run([*command, "train", "--help"], capture_output=True, check=False).returncode == 0
