"""Command line of the converters: `python -m model_converters COMMAND`. Bad input prints one message; exit code 2."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from model_converters.dcp.convert import to_hf, to_mcore, verify
from model_converters.dcp.logits import Compare
from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.hf_config import read_hf_config, weights_dtype
from model_converters.families.parts.mtp import Copies, without_mtp
from model_converters.hf.size import COMPARED_PARAMETERS
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import bind
from model_converters.output import families_markdown, families_text, rows_json, rows_text, write_between_markers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 verify found a difference, 2 bad input, 130 interrupted."""
    parsed = build_parser().parse_args(arguments)
    verb: Callable[[argparse.Namespace], int] = parsed.verb
    try:
        return verb(parsed)
    except ConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        # 128 + SIGINT, as shells report it.
        return 130
    except BrokenPipeError:
        # `head` or `less` closed the pipe. Redirect stdout, or Python reports the error again when it flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. Each subcommand sets `verb`, a function from the parsed arguments to the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m model_converters", description="Convert weights between Hugging Face and Megatron-Core."
    )
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = verbs.add_parser("show", help="print the bound weight table: every row with its ranks and slices")
    show.add_argument("--config", type=_path, required=True, help="config.json, or the HF directory that contains it")
    show.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    show.add_argument("--drop-mtp", action="store_true", help=_DROP_MTP)
    add_layout_flags(show)
    show.set_defaults(verb=show_verb)
    families = verbs.add_parser("families", help="list supported and rejected model families")
    families.add_argument("--markdown", action="store_true", help="print Markdown tables")
    families.add_argument(
        "--into", type=_path, metavar="PAGE", help="write the tables into a Markdown page, between its two markers"
    )
    families.set_defaults(verb=families_verb)
    text = "convert an HF directory to a Megatron-Core distributed checkpoint"
    _add_to_mcore(verbs.add_parser("to-mcore", help=text))
    _add_to_hf(verbs.add_parser("to-hf", help="convert a distributed checkpoint of any layout to an HF directory"))
    text = "compare an HF directory and a checkpoint bit for bit; exit code 1 if they differ"
    _add_verify(verbs.add_parser("verify", help=text))
    return parser


def _add_to_mcore(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--hf", type=_path, required=True, metavar="DIR", help="HF directory: config.json, safetensors")
    verb.add_argument("--out", type=_path, required=True, metavar="DIR", help="checkpoint to write; must not exist")
    verb.add_argument("--lora", type=_path, metavar="DIR", help="PEFT adapter to merge into the weights")
    _add_mtp_flags(verb)
    verb.add_argument("--max-file-gib", type=_positive, default=2.0, metavar="X", help="maximum file size (default 2)")
    verb.add_argument(
        "--logits",
        choices=get_args(Compare),
        default="auto",
        help="compare the logits of both models in float32 on a few random tokens; nothing is written if they differ "
        f"(default auto: up to {COMPARED_PARAMETERS // 10**9} billion parameters and if both models fit in memory)",
    )
    add_layout_flags(verb)
    verb.set_defaults(verb=to_mcore_verb)


def _add_to_hf(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--ckpt", type=_path, required=True, metavar="DIR", help="directory that contains .metadata")
    verb.add_argument("--out", type=_path, required=True, metavar="DIR", help="HF directory to write; must not exist")
    verb.add_argument(
        "--hf", type=_path, metavar="DIR", help="source of config.json and tokenizer files (default: the checkpoint)"
    )
    verb.add_argument("--fp8", action="store_true", help="write weights of linear layers in FP8, in 128 x 128 blocks")
    verb.add_argument("--max-shard-gib", type=_positive, default=5.0, metavar="X", help="maximum file size (default 5)")
    verb.set_defaults(verb=to_hf_verb)


def _add_verify(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--hf", type=_path, required=True, metavar="DIR", help="HF directory")
    verb.add_argument("--ckpt", type=_path, required=True, metavar="DIR", help="directory that contains .metadata")
    verb.add_argument("--lora", type=_path, metavar="DIR", help="PEFT adapter that was merged into the weights")
    _add_mtp_flags(verb)
    verb.add_argument(
        "--logits", action="store_true", help="also compare the logits of both models in float32 on random tokens"
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    verb.set_defaults(verb=verify_verb)


_DROP_MTP = "drop the multi-token-prediction layers"


def _add_mtp_flags(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--drop-mtp", action="store_true", help=_DROP_MTP)
    verb.add_argument(
        "--mtp-copies",
        choices=get_args(Copies),
        default="equal",
        help="treatment of the copies of embedding and head that multi-token-prediction layers store: equal rejects a "
        "copy that differs from the main model's tensor (default), main ignores the copies",
    )


_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def _path(text: str) -> Path:
    """Expand `~`, `~user`, `$NAME` and `${NAME}` in a path, for arguments that the shell did not expand.

    Raises: argparse.ArgumentTypeError for an empty path, an unknown user, a variable that is not set, and a path that
    is not UTF-8.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise argparse.ArgumentTypeError(f"{text}: {path.partition('/')[0]} has no home directory")
    # A path that exists as it is may contain a dollar sign.
    if not os.path.lexists(path):
        for match in _VARIABLE.finditer(path):
            if (match[1] or match[2]) not in os.environ:
                raise argparse.ArgumentTypeError(f"{text}: the environment variable {match[1] or match[2]} is not set")
        path = os.path.expandvars(path)
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = path.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise argparse.ArgumentTypeError(f"{shown} is not UTF-8; rename the file or directory") from None
    return Path(path)


def _positive(text: str) -> float:
    value = float(text)
    # False for NaN as well, which float() accepts.
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that layout_from reads."""
    flags = parser.add_argument_group("layout")
    flags.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    flags.add_argument("--pp", type=int, default=1, help="pipeline stages (default 1)")
    flags.add_argument("--vpp", type=int, help="virtual pipeline chunks per stage")
    flags.add_argument("--ep", type=int, default=1, help="expert-parallel size (default 1)")
    flags.add_argument("--etp", type=int, help="tensor-parallel size of experts (default 1 with --ep > 1, else tp)")
    flags.add_argument("--first-stage-layers", type=int, metavar="N", help="layers on the first pipeline stage")
    flags.add_argument("--last-stage-layers", type=int, metavar="N", help="layers on the last pipeline stage")
    flags.add_argument(
        "--pipeline-layout",
        metavar="TEXT",
        help="Megatron's pipeline layout string, for example 'E|(tt|)*30tmL'; replaces --first-stage-layers, "
        "--last-stage-layers and --vpp",
    )
    flags.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: the minimum)")


def layout_from(parsed: argparse.Namespace) -> TrainLayout:
    """Build the layout that the flags describe.

    Raises: LayoutError if the sizes do not fit.
    """
    # With expert parallelism, experts are not divided by default; otherwise they are divided like dense weights.
    etp = parsed.etp or (1 if parsed.ep > 1 else parsed.tp)
    sizes = [max(size, 1) for size in (parsed.tp, parsed.ep * etp)]
    return TrainLayout(
        world_size=parsed.world_size or max(parsed.pp, 1) * math.lcm(*sizes),
        tp=parsed.tp,
        pp=parsed.pp,
        ep=parsed.ep,
        etp=etp,
        vpp=parsed.vpp if parsed.vpp != 1 else None,
        first_stage_layers=parsed.first_stage_layers,
        last_stage_layers=parsed.last_stage_layers,
        pipeline_layout=parsed.pipeline_layout,
    )


def to_mcore_verb(parsed: argparse.Namespace) -> int:
    to_mcore(
        parsed.hf,
        parsed.out,
        layout_from(parsed),
        lora=parsed.lora,
        drop_mtp=parsed.drop_mtp,
        mtp_copies=parsed.mtp_copies,
        max_file_bytes=int(parsed.max_file_gib * 2**30),
        logits=parsed.logits,
    )
    print(f"wrote {parsed.out}")
    return 0


def to_hf_verb(parsed: argparse.Namespace) -> int:
    max_shard_bytes = int(parsed.max_shard_gib * 2**30)
    to_hf(parsed.ckpt, parsed.out, hf=parsed.hf, fp8=parsed.fp8, max_shard_bytes=max_shard_bytes)
    print(f"wrote {parsed.out}")
    return 0


def verify_verb(parsed: argparse.Namespace) -> int:
    certificate = verify(
        parsed.hf,
        parsed.ckpt,
        lora=parsed.lora,
        drop_mtp=parsed.drop_mtp,
        mtp_copies=parsed.mtp_copies,
        logits=parsed.logits,
    )
    print(json.dumps(certificate.as_json()) if parsed.json else "\n".join(certificate.as_table()))
    return 0 if certificate.holds else 1


def show_verb(parsed: argparse.Namespace) -> int:
    config = read_hf_config(parsed.config)
    if parsed.drop_mtp:
        config = without_mtp(config)
    family_for(config).model_arguments(config)  # rejects unsupported settings before the table is printed
    bound = bind(family_for(config).rows(config), config, weights_dtype(config))
    layout = layout_from(parsed)
    print(json.dumps(rows_json(config, bound, layout)) if parsed.json else "\n".join(rows_text(config, bound, layout)))
    return 0


def families_verb(parsed: argparse.Namespace) -> int:
    if parsed.into:
        write_between_markers(parsed.into)
    else:
        print(families_markdown() if parsed.markdown else "\n".join(families_text()))
    return 0
