"""Words of the command line: options between overrides, paths that are not UTF-8; TERM before a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl import cli
from tests.recorded_run import write_run


@pytest.mark.parametrize(
    ("verb", "option"),
    [("plan", "--json"), ("plan", "--suggest"), ("slurm", "--force"), ("train", "--dry-run"), ("eval", "")],
)
def test_parser_option_between_overrides_keeps_their_order(verb: str, option: str) -> None:
    words = [verb, "c.yaml", "a=b", option, "c=-1"]
    places = [words, [verb, option, "c.yaml", "a=b", "c=-1"], [verb, "c.yaml", "a=b", "c=-1", option]]
    for given in places if option else [words]:
        options = cli._parse([word for word in given if word])
        assert (options.config, options.words) == ("c.yaml", ["a=b", "c=-1"])
        assert not option or getattr(options, option.removeprefix("--").replace("-", "_"))


def test_parser_keys_takes_its_option_on_either_side() -> None:
    for words in (["keys", "--json", "lr"], ["keys", "lr", "--json"]):
        options = cli._parse(words)
        assert (options.word, options.json) == ("lr", True)


def test_parser_debug_rollout_takes_a_configuration() -> None:
    options = cli._parse(["debug", "rollout", "c.yaml", "a=b", "c=-1"])
    assert (options.part, options.config, options.words) == ("rollout", "c.yaml", ["a=b", "c=-1"])


def test_parser_debug_train_takes_its_step_on_any_side() -> None:
    for step in (["--step", "3"], ["--step=3"]):
        places = [[*step, "run", "a=b", "c=-1"], ["run", *step, "a=b", "c=-1"], ["run", "a=b", "c=-1", *step]]
        for words in places:
            options = cli._parse(["debug", "train", *words])
            assert (options.step, options.directory, options.words) == (3, "run", ["a=b", "c=-1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["debug"], "required: PART\n"),
        (["debug", "train", "run"], "required: --step\n"),
        (["debug", "train", "run", "--step"], "--step: expected one argument\n"),
        (["debug", "train", "run", "--step=x"], "--step: invalid int value: 'x'\n"),
        (["plan"], "required: CONFIG.yaml\n"),
        (["plan", "c", "--wrong"], "unrecognized arguments: --wrong"),
    ],
)
def test_parser_wrong_words_exit_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli._parse(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_main_arguments_that_are_not_utf8_exit_with_2(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {hf_path: x}\ndata: {train: x}\n")
    cases = (["train", "c\udcff.yaml"], ["train", "c.yaml", "run.dir=r\udcff"], ["plan", "c.yaml", "zzz\udcff=1"])
    for words in cases:
        command = [sys.executable, "-m", "mcore_rl.cli", *words]
        done = subprocess.run([os.fsencode(word) for word in command], capture_output=True, cwd=tmp_path, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.decode().count("\n") == 1


@pytest.mark.parametrize(
    "words", [["report", "LONG"], ["watch", "LONG"], ["compare", "a", "LONG"], ["train", "c.yaml", "run.dir=LONG"]]
)
def test_main_path_that_cannot_be_reached_exits_with_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("model: {hf_path: x}\ndata: {train: x}\n")
    write_run(tmp_path / "a")
    assert cli.main([word.replace("LONG", "x" * 300) for word in words]) == 2
    error = capsys.readouterr().err
    assert "File name too long; name another path" in error
    assert error.count("\n") == 1


def test_main_prints_a_path_that_is_not_utf8_as_its_bytes(tmp_path: Path) -> None:
    write_run(tmp_path / "run\udcff")
    command = [sys.executable, "-m", "mcore_rl.cli", "report", "run\udcff"]
    done = subprocess.run(list(map(os.fsencode, command)), capture_output=True, cwd=tmp_path, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"run\xff/report.html\n", b"")


def test_main_without_reader_of_its_output_exits_with_141(tmp_path: Path) -> None:
    """`keys`, which only prints, exits with 0: tests/unit/config/test_catalogue.py."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mcore_rl.cli", "report", str(write_run(tmp_path / "run"))]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


INTERRUPTED = """
import os, signal, sys
from mcore_rl import cli
from tests.recorded_run import write_run
cli._keys = lambda options: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["mcore-rl", "keys"]
sys.exit(cli.main())
"""


def test_cli_on_term_before_a_run_exits_with_143() -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 143
    assert not result.stderr
