"""Files that are no launch scripts, and files with other encodings: one message, and no long wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl import cli
from mcore_rl.migration.files import MAX_BYTES
from mcore_rl.migration.verl.reader import read_verl

VERL = "expected a verl launch script (a command such as `python3 -m verl.trainer.main_ppo"
SLIME = "expected a slime launch script (a command such as `python3 train.py --hf-checkpoint DIR"
README = "# Training\n\nRun the *script* (see `docs`):\n\n```bash\nmake train\n```\n\n* it's done | 1 | <b>\n"
PYTHON = "import sys\n\n\ndef main(lr=1e-6):\n    x = {'a': [1, 2]}\n    return f\"{x}\" if lr else '''\n'''\n"
CONTENTS = {
    "empty.sh": "",
    "README.md": README,
    "train.py": PYTHON,
    "comment.sh": "# nothing\n",
    "page.html": "<p>&amp;</p>\n",
}


def message_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that is rejected, and return its message."""
    assert cli.main(list(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("error: ")
    return printed.err


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize(("verb", "expected"), [("import-verl", VERL), ("import-slime", SLIME)])
def test_import_other_text_states_what_it_expects(
    name: str, verb: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(CONTENTS[name])
    assert expected in message_of(capsys, verb, str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x7fELF\0\1", "is not a text file; expected a"),
        (b"PK\3\4\xff\xfe", "is not a text file in UTF-8; expected a"),
        (b"#\n" * MAX_BYTES, f"has more than {MAX_BYTES // 2**20} MiB; expected a"),
    ],
    ids=["binary", "no_utf8", "large"],
)
def test_import_other_bytes_state_what_it_expects(
    data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(data)
    started = time.process_time()
    assert message in message_of(capsys, "import-verl", str(path))
    assert message in message_of(capsys, "import-slime", str(path))
    assert time.process_time() - started < 10


def test_import_file_without_end_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/dev/zero is not a text file" in message_of(capsys, "import-verl", "/dev/zero")


def test_import_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"cannot read {tmp_path}: Is a directory" in message_of(capsys, "import-slime", str(tmp_path))


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"], ids=["windows", "byte_order_mark"])
def test_reader_windows_line_ends_are_those_of_a_script(prefix: bytes, tmp_path: Path) -> None:
    script = (
        'a=(\n  data.train_batch_size=8\n)\npython3 -m verl.trainer.main_ppo \\\n  "${a[@]}" \\\n  algorithm.gamma=1\n'
    )
    path = tmp_path / "run.sh"
    path.write_bytes(prefix + script.replace("\n", "\r\n").encode())
    settings = read_verl(path, {}).settings
    assert (settings["data.train_batch_size"].value, settings["algorithm.gamma"].value) == (8, 1)


def test_reader_source_of_a_device_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("source /dev/zero\npython3 -m verl.trainer.main_ppo data.train_batch_size=8\n")
    assert "source /dev/zero" in read_verl(path, {}).notes[0]
