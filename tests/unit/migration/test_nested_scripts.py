"""Scripts that start other scripts, probe accelerators, run under SLURM, or end a command too early."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl.errors import ConfigError
from mcore_rl.migration.launch import joined_commands
from mcore_rl.migration.shell.interpreter import Evaluation, evaluate_script
from mcore_rl.migration.verl.reader import read_verl
from mcore_rl.migration.verl.translation import translate

PROGRAM = "python3 -m verl.trainer.main_ppo"
REQUIRED = "actor_rollout_ref.model.path=/m data.train_files=/t.parquet trainer.total_training_steps=8"


def evaluate(script: str, directory: Path = Path(), **given: str) -> Evaluation:
    return evaluate_script(script, given, directory)


def words(evaluation: Evaluation) -> list[str]:
    return [word.text for word in evaluation.commands[-1]]


@pytest.mark.parametrize("command", ["bash", "exec bash -x", "sbatch --nodes=1", "srun bash", "./"])
def test_reader_follows_a_script_with_its_arguments(command: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('n=${n:-1}; record $n "$@"; n=9\n')
    start = f"{command}run.sh" if command == "./" else f"{command} run.sh"
    evaluation = evaluate(f"n=2 {start} a 'b c'\nrecord ${{n:-unset}}", tmp_path)
    assert [[word.text for word in found] for found in evaluation.commands] == [
        ["record", "2", "a", "b c"],
        ["record", "unset"],
    ]


def test_reader_finds_a_script_below_the_top_of_a_repository(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "a"
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text("record ok\n")
    assert words(evaluate("bash ${PWD}/examples/a/run.sh", folder)) == ["record", "ok"]


def test_reader_missing_script_is_noted_and_stays_a_command() -> None:
    evaluation = evaluate("bash none.sh data.x=1")
    assert words(evaluation) == ["bash", "none.sh", "data.x=1"]
    assert evaluation.notes == ["line 1: none.sh is another script, which is not here"]


def test_reader_script_that_starts_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("record a\nbash run.sh\n")
    assert len(evaluate("bash run.sh", tmp_path).commands) < 100


@pytest.mark.parametrize("command", ["bash", "source"])
def test_reader_scripts_that_multiply_are_rejected(command: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{command} run.sh\n{command} run.sh\n")
    with pytest.raises(ConfigError, match="starts more than 100 other scripts"):
        evaluate("bash run.sh", tmp_path)


def test_reader_probe_of_another_accelerator_fails() -> None:
    probe = "python3 -c 'import torch_npu' 2>/dev/null"
    script = f"""
        D=${{D:-$({probe} && echo npu || echo gpu)}}
        case "$D" in gpu) n=8 ;; npu) n=16 ;; esac
        if {probe}; then n=0; fi
        record $D $n"""
    evaluation = evaluate(script)
    assert words(evaluation) == ["record", "gpu", "8"]
    assert evaluation.notes == []
    assert words(evaluate(script, D="npu")) == ["record", "npu", "16"]


def test_reader_job_script_knows_its_nodes_and_gpus() -> None:
    script = (
        "#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:8\nrecord $SLURM_JOB_NUM_NODES $SLURM_GPUS_PER_NODE $SLURM_JOBID\n"
    )
    assert words(evaluate(script)) == ["record", "4", "8", "${SLURM_JOBID}"]
    assert words(evaluate(script, SLURM_JOB_NUM_NODES="2"))[1] == "2"


def test_reader_test_of_a_missing_file_names_no_variable() -> None:
    evaluation = evaluate('if [ ! -d "$HOME/none" ]; then a=1; fi')
    assert evaluation.notes == ['line 1: `[ ! -d "$HOME/none" ]` is not known here and counts as false']


def test_reader_required_variable_that_is_empty_is_unknown() -> None:
    assert words(evaluate('M=${M:-}\n: "${M:?set it}"\nrecord "$M"')) == ["record", "${M}"]


@pytest.mark.parametrize(
    "end",
    ["\\  # a comment", "\\ ", "", "\\\n    # algorithm.gamma=0.5 \\"],
    ids=["comment", "blank", "no_backslash", "comment_line"],
)
def test_reader_command_that_ends_early_keeps_all_arguments(end: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"{PROGRAM} \\\n    {REQUIRED} \\\n    data.train_batch_size=64 {end}\n    data.shuffle=False \\\n\n"
    )
    read = read_verl(script, {})
    assert {"data.train_batch_size", "data.shuffle"} <= set(read.settings)
    assert len([note for note in read.notes if "the shell ends the command before this line" in note]) == 1


def test_launch_programs_are_not_joined() -> None:
    commands = evaluate("a.py --x 1\nb --y 2\nc=3 d\n").commands
    assert joined_commands(commands) == (commands, [])


def test_reader_configuration_is_found_from_the_top_of_a_repository(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "multi"
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "mine.yaml").write_text("data: {train_batch_size: 48}\nalgorithm: {adv_estimator: rloo}\n")
    script = folder / "run.sh"
    script.write_text(
        f'P="$(pwd)"\nC="$P/examples/multi/config"\n{PROGRAM} --config-path="$C" --config-name=\'mine\' {REQUIRED}\n'
    )
    read = read_verl(script, {})
    assert read.notes == []
    assert translate(read.settings)[1].values["trainer.prompts_per_step"] == 48


def test_import_unread_branch_is_named_with_the_missing_number(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f'case "$MACHINE" in a) n=4 ;; b) n=8 ;; esac\n{PROGRAM} {REQUIRED} trainer.nnodes=$n\n')
    read = read_verl(script, {"MACHINE": "b"})
    assert read.settings["trainer.nnodes"].value == 8
    script.write_text(script.read_text().replace("$MACHINE", "$(hostname)"))
    assert read_verl(script, {}).notes == ['line 1: `case "$(hostname)"` is not known here, skipped']
