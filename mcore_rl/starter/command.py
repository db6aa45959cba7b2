"""Command `mcore-rl init`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from mcore_rl.doctor.machine import Machine
    from mcore_rl.planner.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. A question without its flag is asked in the terminal."""
    parser.add_argument(
        "--model", metavar="DIR", help="Hugging Face directory with config.json, or a hub id; weights can follow later"
    )
    parser.add_argument("--train", metavar="FILE", help="training prompts: jsonl, parquet or CSV")
    parser.add_argument("--val", metavar="FILE", help="validation prompts; default: none")
    parser.add_argument("--algorithm", metavar="NAME", help="grpo (default), dapo or gspo")
    parser.add_argument("--reward", metavar="GRADER", help="built-in grader, or file.py:function; default: math")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of the machine that will run; default: this machine's"
    )
    parser.add_argument("--gpu-memory-gib", type=int, metavar="GIB", help="memory of one of these GPUs")
    parser.add_argument("--out", metavar="FILE", default="config.yaml", help="new file; default: config.yaml")


def run(options: argparse.Namespace) -> int:
    """Ask, inspect the machine, plan, and write the configuration.

    Raises: ConfigError for invalid answers, an existing file, or a model that does not fit.
    """
    from mcore_rl.config.document import check_new, write_new
    from mcore_rl.planner.import_warnings import suppress_megatron_warnings
    from mcore_rl.starter.answers import QUESTIONS, collect, read_from_terminal
    from mcore_rl.starter.draft import as_text, drafted

    target = Path(options.out)
    # Before the questions, whose answers would be lost.
    check_new(target)
    _check_machine(options)
    flags = {question.name: getattr(options, question.name) for question in QUESTIONS}
    answers = collect(flags, read_from_terminal if sys.stdin.isatty() else None, _complain)
    machine = _machine(options)
    print(f"machine: {machine.describe()}; planning", file=sys.stderr, flush=True)
    suppress_megatron_warnings()
    from mcore_rl.starter.layout import accepted, with_kv_cache, with_layout

    draft = drafted(answers, machine)
    draft = with_layout(draft, machine.num_gpus) if machine.num_gpus else with_kv_cache(draft)
    plan = accepted(draft)
    title = f"Written by mcore-rl init. Machine: {machine.describe()}.\n`mcore-rl keys` describes all keys."
    write_new(as_text(draft, title), target)
    print(f"wrote {target}: {len(draft)} keys\nplan: fits{_memory(plan, machine)}")
    for warning in plan.verdict.warnings:
        print(f"plan: {warning}")
    print(f"next: mcore-rl train {shlex.quote(str(target))}")
    return 0


def _check_machine(options: argparse.Namespace) -> None:
    if (options.gpus is None) != (options.gpu_memory_gib is None):
        raise ConfigError("--gpus and --gpu-memory-gib describe another machine together; set both or none")
    for flag, value in (("--gpus", options.gpus), ("--gpu-memory-gib", options.gpu_memory_gib)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag}={value} must be at least 1")


def _machine(options: argparse.Namespace) -> Machine:
    from mcore_rl.doctor.machine import Machine, this_machine

    return this_machine() if options.gpus is None else Machine(options.gpus, gpu_memory_gib=options.gpu_memory_gib)


def _memory(plan: Plan, machine: Machine) -> str:
    """Describe the memory of the fullest rank; nothing on CPU, where it is not limited."""
    if not machine.num_gpus:
        return ""
    return f", the fullest rank needs {plan.fullest.phases.peak_bytes / 2**30:.1f} of {machine.gpu_memory_gib} GiB"


def _complain(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
