"""Settings of a slime run, from a launch script with arrays of arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.migration.files import is_yaml, read_text
from mcore_rl.migration.launch import find_launches, flag_values, joined_commands
from mcore_rl.migration.read_input import ReadInput
from mcore_rl.migration.shell.interpreter import evaluate_script
from mcore_rl.migration.source import Setting, parsed_value

PROGRAM = "-m"
"""Name of the setting that holds the program, train.py or train_async.py."""
OWN = ("--hf-checkpoint", "--rollout-batch-size", "--prompt-data", "--num-rollout", "--advantage-estimator")
"""Arguments that identify slime."""
LISTS = ("eval-prompt-data", "rollout-stop", "rollout-stop-token-ids", "prompt-data")
"""Arguments with several values."""
EXPECTED = (
    "a slime launch script (a command such as `python3 train.py --hf-checkpoint DIR --rollout-batch-size 32 ...`)"
)


def read_slime(path: Path, given: Mapping[str, str]) -> ReadInput:
    """Read a launch script. `given`: variables of the script.

    Raises: ConfigError if the file is no script, or starts no training of slime.
    """
    if is_yaml(path):
        raise ConfigError(f"{path} is a YAML file; expected {EXPECTED}")
    evaluation = evaluate_script(read_text(path, EXPECTED), given, path.parent.absolute())
    commands, joined = joined_commands(evaluation.commands)
    launches = find_launches(commands, lambda text: text.partition("=")[0] in OWN)
    if not launches:
        skipped = f" ({'; '.join(evaluation.notes)})" if evaluation.notes else ""
        raise ConfigError(f"{path} starts no training of slime{skipped}; expected {EXPECTED}")
    launch, notes = launches[0], list(dict.fromkeys([*evaluation.notes, *joined]))
    flags = flag_values(launch.arguments)
    settings = {name: Setting(f"--{name}", _value(name, values), line) for name, (values, line) in flags.items()}
    settings[PROGRAM] = Setting(PROGRAM, launch.program, launch.line)
    for other in launches[1:]:
        notes.append(f"line {other.line}: another command, {other.program}, is not read")
    return ReadInput(settings, f"line {launch.line}, {launch.program}", notes)


def _value(name: str, texts: Sequence[str]) -> object:
    """Return the value of an argument: True for a flag, a list for several values."""
    if not texts:
        return True
    values = [parsed_value(text) for text in texts]
    return values if len(values) > 1 or name in LISTS else values[0]
