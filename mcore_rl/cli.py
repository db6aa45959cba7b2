"""Command line of mcore-rl.

Exit codes: 0 success; 1 failure while running; 2 invalid input (one message, no traceback); 130 and 143 stopped by INT
and TERM; 141 the reader of stdout has ended; 75 saved and stopped by USR1. After a stop, `train` prints the command
that resumes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mcore_rl import __version__
from mcore_rl.doctor.command import add_arguments as add_doctor_arguments
from mcore_rl.doctor.command import run as run_doctor
from mcore_rl.errors import ConfigError, McoreRLError, path_error, storage_error
from mcore_rl.migration.command import add_arguments as add_import_arguments
from mcore_rl.migration.command import run as run_import
from mcore_rl.rollout.connectors.command import add_arguments as add_rows_arguments
from mcore_rl.rollout.connectors.command import run as run_rows
from mcore_rl.starter.command import add_arguments as add_init_arguments
from mcore_rl.starter.command import run as run_init

CONFIGURED_VERBS = ("train", "eval", "serve", "plan", "slurm")
"""Verbs that take configuration files and overrides."""
BROKEN_PIPE = 141
"""Exit code if the reader of stdout has ended, as of a program that SIGPIPE ends."""
TABLES = ("keys", "compare", "watch")
"""Verbs that only print: a reader that ends early has what it wanted, and the exit code is 0."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    if arguments is None:  # called as a program, not from other code; train and eval install their own handler
        signal.signal(signal.SIGTERM, _exit_on_term)
        _print_all_characters()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code = int(options.run(options) or 0)
        # Inside the block, since a closed pipe is detected when the buffer is written.
        sys.stdout.flush()
        return code
    except (McoreRLError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_ended():
            return 0 if options.verb in TABLES else BROKEN_PIPE
        # A full disk can be met by any write of a run, and a forbidden path by any key.
        known = storage_error(error) or path_error(error) if isinstance(error, OSError) else error
        if known is None:
            raise
        from mcore_rl.config.pages import with_page
        from mcore_rl.observe.terminal_text import printable

        # A message may quote a file name, a script or a model's text.
        print(f"error: {with_page(printable(str(known)))}", file=sys.stderr)
        return known.exit_code
    except KeyboardInterrupt:
        from mcore_rl.runtime.stops import STOPS

        print("stopped", file=sys.stderr)
        return STOPS.exit_code()


def _exit_on_term(number: int, frame: FrameType | None) -> NoReturn:
    # An exception runs the finally blocks, which the default action of TERM would not.
    raise SystemExit(128 + number)


def _print_all_characters() -> None:
    """Let stdout print paths that are not UTF-8 as their bytes (PEP 383), and escape characters that another encoding
    lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _reader_has_ended() -> bool:
    """Return whether stdout is a pipe without a reader, such as `head`, and drop the output in this case."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    # Python flushes stdout when it exits, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # set by the shell that asks for completions
        from mcore_rl.completion import complete

        complete(parser, options_first)
    return parser.parse_args(options_first(words))


def options_first(words: Sequence[str]) -> list[str]:
    """Move words that begin with two dashes to the front: argparse rejects options between overrides. Options of these
    verbs have no values, except --step."""
    verb, rest = list(words[:1]), list(words[1:])
    if verb and verb[0] in CONFIGURED_VERBS:
        rest.sort(key=lambda word: not word.startswith("--"))
    if list(words[:2]) == ["debug", "train"]:
        verb, rest = list(words[:2]), _step_first(words[2:])
    return [*verb, *rest]


def _step_first(words: Sequence[str]) -> list[str]:
    """Move `--step N` or `--step=N` to the front."""
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] == "--step"), len(words))
    end = place + (1 if "=" in "".join(words[place : place + 1]) else 2)
    # argparse reports an option without a value only where it is.
    return [*words[place:end], *words[:place], *words[end:]] if end <= len(words) else list(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mcore-rl", description="Reinforcement learning on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"mcore-rl {__version__}")
    verbs = parser.add_subparsers(required=True, dest="verb", metavar="VERB")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, description=text)
        verb.set_defaults(run=run)
        return verb

    def add_configured(name: str, text: str, example: str = "trainer.steps=3") -> argparse.ArgumentParser:
        """Add a verb that takes a configuration."""
        verb = add(name, text, _run_configured)
        _add_config(verb, example)
        return verb

    text = "write a first configuration for this machine, after five questions, with an explanation of each line"
    add_init_arguments(add("init", text, run_init))
    train = add_configured("train", "start a run, or resume what run.dir holds")
    text = "check and plan the run, print where each process would start, and stop before anything is written"
    train.add_argument("--dry-run", action="store_true", help=text)
    add_configured("eval", "validate only: the newest checkpoint in run.dir, or model.hf_path if there is none")
    text = (
        "serve the newest checkpoint in run.dir, or model.hf_path, with OpenAI's interface; CONFIG may be a run.dir or "
        "one of its checkpoints"
    )
    add_configured("serve", text, "rollout.gateway_port=8000")
    _add_chat(add("chat", "talk to a model that `serve` serves", _chat))
    text = (
        "preflight without a GPU: memory, communication and computation of every rank; exit code 0: fits, 1: does not "
        "fit, 3: fits, but this version cannot run it"
    )
    plan = add_configured("plan", text, "actor.parallel.ep=16")
    plan.add_argument("--json", action="store_true", help="print one JSON object on stdout, also if it does not fit")
    plan.add_argument("--suggest", action="store_true", help="search for layouts that fit and print them, best first")
    slurm = add_configured("slurm", "print a job script for sbatch", "cluster.nodes=64")
    slurm.add_argument("--force", action="store_true", help="print the script even if plan rejects the job")
    _add_debug_parts(add("debug", "examine one part of a run", _debug))
    keys = add("keys", "every configuration key: its type, default, unit, range and meaning", _keys)
    keys.add_argument("word", metavar="WORD", nargs="?", default="", help="only keys with WORD in name or description")
    keys.add_argument("--json", action="store_true", help="print a JSON list of objects")
    _add_report(add("report", "write report.html about one or several runs", _report))
    _add_watch(add("watch", "show the progress of a run in this terminal until it has finished", _watch))
    _add_compare(add("compare", "print the differences between runs, with their significance over seeds", _compare))
    text = "show versions, devices, engines, trackers and missing packages; --node: test devices and network"
    add_doctor_arguments(add("doctor", text, run_doctor))
    _add_harness_worker(add("harness-worker", "run programs for the gateway of a run, here", _harness_worker))
    text = "write rows of an environment or evaluation suite of another library, for data.train and data.val"
    add_rows_arguments(add("rows", text, run_rows))
    for trainer in ("verl", "slime"):
        text = f"translate a launch script of {trainer} to a configuration, with a list of differences"
        add_import_arguments(add(f"import-{trainer}", text, run_import), trainer=trainer)
    completion = add("completion", "print the script that enables completion in a shell", _completion)
    completion.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    return parser


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="run.dir of a run, also while it is in progress")
    parser.add_argument("--out", metavar="FILE", help="instead of report.html in the first RUN_DIR")


def _add_watch(parser: argparse.ArgumentParser) -> None:
    text = "run.dir of a run, also on another host that shares the directory"
    parser.add_argument("directory", metavar="RUN_DIR", help=text)
    parser.add_argument("--once", action="store_true", help="print one frame, also if stdout is no terminal")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="run.dir of a run")
    text = "other runs; runs that differ only in run.seed are repetitions"
    parser.add_argument("others", metavar="B", nargs="+", help=text)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    text = "run.dir of the served run, or the URL that `serve` prints"
    parser.add_argument("server", metavar="RUN_DIR|URL", help=text)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit of a reply; default: the run's")


def _add_harness_worker(parser: argparse.ArgumentParser) -> None:
    text = "run.dir of a run in progress with rollout.episode=gateway, or the URL of a gateway"
    parser.add_argument("gateway", metavar="RUN_DIR|URL", help=text)
    text = "module_or_file.py:name of a function of (row, base_url, api_key), called for each session"
    parser.add_argument("--function", metavar="SPEC", help=text)
    parser.add_argument("--command", metavar="TEXT", help="command, run for each session without a sandbox")
    text = "sessions at a time; default 16"
    parser.add_argument("--concurrent", type=int, default=16, metavar="N", help=text)


def _harness_worker(options: argparse.Namespace) -> int:
    from mcore_rl.rollout.gateway.harness.remote import WorkerOptions, work

    if options.concurrent < 1:
        raise ConfigError(f"--concurrent {options.concurrent} must be at least 1")
    return work(WorkerOptions(options.gateway, options.function, options.command, options.concurrent))


def _add_config(parser: argparse.ArgumentParser, example: str) -> None:
    """Add the arguments of a configuration."""
    parser.add_argument("config", metavar="CONFIG.yaml")
    text = f"further files, whose keys replace those of earlier ones, and overrides such as {example}"
    parser.add_argument("words", nargs="*", default=[], metavar="MORE.yaml|key=value", help=text)


def _add_debug_parts(debug: argparse.ArgumentParser) -> None:
    parts = debug.add_subparsers(required=True, dest="part", metavar="PART")
    text = "generate and grade the first batch with the weights of model.hf_path, without trainer ranks, and print it"
    _add_config(parts.add_parser("rollout", help=text, description=text), "trainer.prompts_per_step=2")
    text = "repeat the update of a step on its recorded responses, without engines, and compare its metrics"
    train = parts.add_parser("train", help=text, description=text)
    train.add_argument("directory", metavar="RUN_DIR", help="run.dir of a run with observe.keep_trajectories")
    train.add_argument("--step", type=int, required=True, metavar="N", help="step to repeat")
    text = "overrides of the run's configuration, such as actor.optimizer.lr=1e-6"
    train.add_argument("words", nargs="*", default=[], metavar="key=value", help=text)


def _run_configured(options: argparse.Namespace) -> int:
    """Run a verb that takes a configuration."""
    from mcore_rl import verbs
    from mcore_rl.config import load_config
    from mcore_rl.remote.localize import localized, pinned_overrides
    from mcore_rl.resumption import resume_advice
    from mcore_rl.slurm.checks import check_job

    step = None
    if options.verb == "serve":
        options.config, options.words, step = _of_run(options.config, options.words)
    files, overrides = _files_and_overrides(options)
    config = load_config(files, overrides, needs_data=options.verb not in ("plan", "serve"))
    match options.verb:
        case "train" if options.dry_run:
            from mcore_rl.debugging.dry_run import dry_run

            return dry_run(config)
        case "train":
            return verbs.train(config, resume_advice(config, files, overrides))
        case "eval":
            return verbs.evaluate(config)
        case "serve":
            from mcore_rl.serving import serve

            return serve(config, step)
        case "plan":
            with localized(config, _note, weights=False, data=False):
                return verbs.plan(config, as_json=options.json, suggest=options.suggest)
        case _:
            check_job(config)  # before a download
            # Nodes of a cluster often have no network, and a job that is queued again must use the same files.
            with localized(config, _note) as names:
                pinned = pinned_overrides(config, names)
                return verbs.slurm(config, files, overrides, pinned, force=options.force)


def _of_run(config: str, words: Sequence[str]) -> tuple[str, list[str], int | None]:
    """Return the configuration of a run directory or of a checkpoint in it, overrides that keep the directory, and the
    step of the checkpoint; other arguments as given.

    Raises: ConfigError for another directory.
    """
    if not os.path.isdir(config):
        return config, list(words), None
    from mcore_rl.config.run_configs import CONFIG_FILE

    directory, step = Path(config).absolute(), None
    if not (directory / CONFIG_FILE).exists() and (match := re.fullmatch(r"step_(\d+)", directory.name)):
        directory, step = directory.parents[1], int(match[1])
    if not (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"{config} has no {CONFIG_FILE}; name a run directory, one of its checkpoints "
            "(RUN_DIR/checkpoints/step_N), or a configuration whose model.hf_path is the model"
        )
    return str(directory / CONFIG_FILE), [f"run.dir={directory}", *words], step


def _chat(options: argparse.Namespace) -> int:
    from mcore_rl.serving import chat

    return chat(options.server, options.system, options.max_tokens)


def _note(line: str) -> None:
    """Print a line that is no part of the output of `plan` or `slurm`."""
    print(line, file=sys.stderr, flush=True)


def _debug(options: argparse.Namespace) -> int:
    if options.part == "train":
        from pathlib import Path

        from mcore_rl.debugging.train import debug_train

        return debug_train(Path(options.directory), options.step, options.words)
    from mcore_rl.config import load_config
    from mcore_rl.debugging.rollout import debug_rollout

    return debug_rollout(load_config(*_files_and_overrides(options)))


def _files_and_overrides(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Separate the files of a command from its overrides."""
    from mcore_rl.config.reading.overrides import split_words

    return split_words([options.config, *options.words])


def _report(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mcore_rl.observe.report.write import write_report

    print(write_report([Path(run) for run in options.runs], None if options.out is None else Path(options.out)))
    return 0


def _watch(options: argparse.Namespace) -> int:
    from functools import partial
    from pathlib import Path

    from mcore_rl.observe.watch.live import watch
    from mcore_rl.preparation.run_dir import holder_renewal

    directory = Path(options.directory)
    return watch(directory, partial(holder_renewal, directory), once=options.once)


def _compare(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mcore_rl.observe.compare.command import compare

    return compare([Path(run) for run in (options.first, *options.others)])


def _keys(options: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from mcore_rl.config.catalogue import find_keys

    keys = find_keys(options.word)
    print(json.dumps([asdict(entry) for entry in keys]) if options.json else "\n".join(e.shown() for e in keys))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from mcore_rl.completion import script

    print(script(options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
