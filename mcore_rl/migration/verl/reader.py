"""Settings of a verl run, from a launch script, a YAML configuration, or a YAML file with a script (SkyPilot)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mcore_rl.config.reading.values import NoneWord
from mcore_rl.errors import ConfigError
from mcore_rl.migration.files import is_yaml, read_text, read_yaml
from mcore_rl.migration.launch import Launch, find_launches, flag_values, joined_commands
from mcore_rl.migration.read_input import ReadInput
from mcore_rl.migration.shell.interpreter import Evaluation, evaluate_script
from mcore_rl.migration.shell.words import UNKNOWN
from mcore_rl.migration.source import Setting, flattened, parsed_value
from mcore_rl.migration.verl.run import CONFIG_NAME, MODULE

SECTIONS = ("actor_rollout_ref", "algorithm", "critic", "data", "trainer", "reward", "reward_model", "optim", "model")
_OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_DELETION = re.compile(r"~([A-Za-z_][\w.]*)(?:=.*)?", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^}]*))?\}")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)(?:,([^}]*))?\}")
EXPECTED = (
    "a verl launch script (a command such as `python3 -m verl.trainer.main_ppo data.train_files=...`) or a YAML "
    "configuration with verl's sections actor_rollout_ref, algorithm, data and trainer"
)
MISSING = "???"
"""Value of a mandatory key that Hydra's user has to set."""
NO_TRAINING = ("main_gen", "main_eval")
"""Beginnings of programs that generate or grade responses only."""
BUILT_IN = re.compile(r"(\w+_)?(ppo|dapo|sft|one_step_off|fully_async)\w*trainer\w*")
"""Names of configurations that are part of verl and its recipes."""


def read_verl(path: Path, given: Mapping[str, str], base: Path | None = None) -> ReadInput:
    """Read a launch script or YAML file.

    given: variables of the script. base: YAML file with the configuration that a script overrides.

    Raises: ConfigError if the file is neither.
    """
    if not is_yaml(path):
        return _from_script(path, read_text(path, EXPECTED), given, base)
    tree = read_yaml(path, EXPECTED)
    run = tree.get("run")
    if isinstance(run, str):
        return _from_script(path, run, given, base)
    if not any(isinstance(tree.get(section), dict) for section in SECTIONS):
        raise ConfigError(f"{path} has none of verl's sections; expected {EXPECTED}")
    return ReadInput(_yaml_settings(tree), "YAML configuration")


def _from_script(path: Path, text: str, given: Mapping[str, str], base: Path | None) -> ReadInput:
    evaluation: Evaluation = evaluate_script(text, given, path.parent.absolute())
    commands, joined = joined_commands(evaluation.commands)
    launches = find_launches(commands, _is_override)
    if not launches:
        skipped = f" ({'; '.join(evaluation.notes)})" if evaluation.notes else ""
        raise ConfigError(f"{path} starts no training of verl{skipped}; expected {EXPECTED}")
    launch, notes = launches[0], list(dict.fromkeys([*evaluation.notes, *joined]))
    if launch.program.rpartition(".")[2].startswith(NO_TRAINING):
        raise ConfigError(f"{path}, line {launch.line}: {launch.program} trains nothing; expected {EXPECTED}")
    for other in launches[1:]:
        notes.append(f"line {other.line}: another command, {other.program}, is not read")
    settings = _base_settings(path, launch, base, notes)
    for name, (values, line) in flag_values(launch.options).items():
        # Numbers of processes of torchrun.
        if name.replace("_", "-") in ("nproc-per-node", "nnodes") and values:
            key = "--nproc_per_node" if "nproc" in name else "--nnodes"
            settings[key] = Setting(key, parsed_value(values[0]), line)
    settings[MODULE] = Setting(MODULE, launch.program, launch.line)
    _apply(launch, settings)
    return ReadInput(settings, f"line {launch.line}, {launch.program}", notes)


def _apply(launch: Launch, settings: dict[str, Setting]) -> None:
    """Apply overrides in their order: key=value, +key=value, ++key=value, ~key."""
    for word in launch.arguments:
        if (deletion := _DELETION.fullmatch(word.text)) is not None:
            for key in [key for key in settings if key == deletion[1] or key.startswith(f"{deletion[1]}.")]:
                del settings[key]
        elif (override := _OVERRIDE.fullmatch(word.text)) is not None and not word.text.startswith("-"):
            key, value = override[2], parsed_value(override[3])
            if isinstance(value, dict) and value:
                for name, leaf in flattened(value, f"{key}."):
                    settings[name] = Setting(name, leaf, word.line)
            else:
                settings[key] = Setting(key, value, word.line)


def _base_settings(path: Path, launch: Launch, base: Path | None, notes: list[str]) -> dict[str, Setting]:
    """Read the configuration that the command overrides, if its file is here."""
    flags = flag_values([word for word in launch.arguments if word.text.startswith("-")])
    name = next((flags[flag][0][0] for flag in ("config-name", "cn") if flags.get(flag, ([], 0))[0]), None)
    settings: dict[str, Setting] = {}
    if name is not None:
        settings[CONFIG_NAME] = Setting(CONFIG_NAME, name, flags.get("config-name", ([], None))[1])
    if base is not None:
        return {**settings, **_yaml_settings(read_yaml(base))}
    if name is None:
        return settings
    folder = next(
        (flags[flag][0][0] for flag in ("config-path", "config-dir") if flags.get(flag, ([], 0))[0]), "config"
    )
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    for directory in _folders(path.absolute().parent, folder):
        if not UNKNOWN.search(str(directory)) and (directory / file).is_file():
            return {**settings, **_yaml_settings(read_yaml(directory / file))}
    if not BUILT_IN.fullmatch(Path(file).stem):
        notes.append(f"--config-name={name}: there is no such file here; add --base FILE to read its values")
    return settings


def _folders(script: Path, folder: str) -> Iterator[Path]:
    """Yield the places of a folder of configurations: as it is written; below the script's directory or a parent,
    since scripts are often started from the top of a repository; and beside the script."""
    yield Path(folder)
    relative = folder.removeprefix("${PWD}/")
    yield from (directory / relative for directory in (script, *script.parents))
    yield from (script / "config", script)


def _yaml_settings(tree: Mapping[str, object]) -> dict[str, Setting]:
    """Flatten a YAML configuration and resolve references to other keys."""
    flat = dict(flattened(tree))
    settings = {}
    for key, value in flat.items():
        resolved = _resolved(key, value, flat)
        # A reference to a missing key is left out. A name without sections is an environment variable.
        names = [match[1] for match in _INTERPOLATION.finditer(resolved)] if isinstance(resolved, str) else []
        if resolved != MISSING and not any("." in name for name in names):
            settings[key] = Setting(key, None if isinstance(resolved, NoneWord) else resolved)
    defaults = tree.get("defaults")
    names = [name for name in defaults if isinstance(name, str)] if isinstance(defaults, list) else []
    trainer = next((name for name in names if name.endswith("trainer")), None)
    if trainer is not None:
        settings[CONFIG_NAME] = Setting(CONFIG_NAME, trainer)
    return settings


def _resolved(key: str, value: object, flat: Mapping[str, object], depth: int = 0) -> object:
    if not isinstance(value, str) or depth > len(flat):
        return value
    if _ENVIRONMENT.search(value):
        # Without a default, the variable is expanded in paths and reported elsewhere.
        value = _ENVIRONMENT.sub(lambda part: f"${{{part[1]}}}" if part[2] is None else part[2].strip(), value)
        return parsed_value(value)
    match = _INTERPOLATION.fullmatch(value)
    if match is None:
        parts = (_resolved(key, part[0], flat, depth + 1) for part in _INTERPOLATION.finditer(value))
        return _INTERPOLATION.sub(lambda part: str(next(parts)), value)
    name = f"{key.rpartition('.')[0]}{match[1]}" if match[1].startswith(".") else match[1]
    if name in flat:
        return _resolved(name, flat[name], flat, depth + 1)
    return value if match[2] is None else parsed_value(match[2].strip())


def _is_override(text: str) -> bool:
    match = _OVERRIDE.fullmatch(text)
    return match is not None and "." in match[2] and match[2].split(".")[0] in SECTIONS
