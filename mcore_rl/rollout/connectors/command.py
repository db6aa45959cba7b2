"""Command `mcore-rl rows`: rows of another library's environment or suite as a data file."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError
from mcore_rl.rollout.connectors.libraries import ENVIRONMENTS, KINDS

if TYPE_CHECKING:
    from mcore_rl.types.json import JsonValue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=f"library: {', '.join(KINDS)}")
    text = "environment or task of the library; file.py[:task]; or the URL of an OpenEnv server"
    parser.add_argument("name", metavar="NAME", help=text)
    parser.add_argument("--out", metavar="FILE", required=True, help="new file, JSON lines")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="default: train")
    parser.add_argument("--limit", type=int, metavar="N", help="maximum number of rows; default: all, or 1000 seeds")
    parser.add_argument("--arguments", metavar="JSON", default="{}", help="arguments of the environment or task")
    parser.add_argument("--prompt", metavar="TEXT", help="instruction of a gymnasium or openenv environment")
    parser.add_argument("--actions", metavar="A,B,...", default="", help="names of a gymnasium environment's actions")


def run(options: argparse.Namespace) -> int:
    """Write the rows.

    Raises: ConfigError for a missing package, an unknown environment, invalid options or an existing file.
    """
    from mcore_rl.config.document import check_new, write_new
    from mcore_rl.rollout.connectors.interface import RowRequest
    from mcore_rl.rollout.connectors.registry import load_rows

    target = Path(options.out)
    check_new(target)
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit={options.limit} must be at least 1")
    actions = [name.strip() for name in options.actions.split(",") if name.strip()]
    if options.kind not in ENVIRONMENTS and (options.prompt is not None or actions):
        raise ConfigError(
            f"--prompt and --actions have no effect on {options.kind}, whose rows have prompts; remove them"
        )
    arguments = _arguments(options.arguments)
    request = RowRequest(options.name, arguments, options.split, options.limit, options.prompt, actions)
    lines = [json.dumps(row) + "\n" for row in islice(load_rows(options.kind).rows(request), options.limit)]
    if not lines:
        raise ConfigError(f"{options.name} has no rows in the split {options.split}; set --split")
    write_new("".join(lines), target)
    print(f"wrote {target}: {len(lines)} rows")
    return 0


def _arguments(text: str) -> dict[str, JsonValue]:
    from mcore_rl.data.json_text import parse_json

    arguments = parse_json(text, "--arguments")
    if not isinstance(arguments, dict):
        raise ConfigError(f"--arguments={text} must be a JSON object, such as '{{\"num_examples\": 100}}'")
    return arguments
