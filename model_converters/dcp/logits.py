"""Whether megatron's model of a checkpoint computes what transformers' model of the HF directory does."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Literal

from model_converters.dcp.verify import LogitDifference
from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.size import reason_not_to_compare

Compare = Literal["auto", "always", "never"]


def should_compare_logits(source: HFCheckpoint, logits: Compare, lora: Path | None) -> bool:
    """Whether a conversion compares logits; where it does not although "auto" was asked for, the reason is printed.

    Raises: ConversionError for "always" of what transformers does not compute as it is written.
    """
    if logits == "never":
        return False
    reason = None
    if lora is not None:
        reason = "transformers runs the HF model as it is, without --lora"
    elif source.block is not None:
        reason = "transformers computes in FP8 where the checkpoint has what the weights stand for"
    if logits == "always" and reason is not None:
        raise ConversionError(f"--logits always: {reason}")
    if logits == "auto" and reason is None and (size := reason_not_to_compare(source)):
        reason = f"{size}; --logits always compares them"
    if reason is not None:
        print(f"logits are not compared: {reason}", file=sys.stderr)
    return reason is None


def require_same_logits(hf: Path, ckpt: Path, config: dict[str, Any]) -> None:
    """Raises: ConversionError when logits differ, or transformers cannot compute any."""
    remedy = "nothing is written; --logits never converts all the same"
    try:
        difference = compare_logits(hf, ckpt, config)
    except ConversionError as error:
        raise ConversionError(f"--hf {hf}: {error}; {remedy}") from error
    if difference.problem is not None:
        raise ConversionError(
            f"--hf {hf}: logits {difference.problem}: from its config.json transformers computes something else with "
            f"these weights than megatron does; {remedy}"
        )
    print(f"logits agree with those of transformers: they differ by at most {difference.max_abs_diff:.3g}")


def compare_logits(hf: Path, ckpt: Path, config: dict[str, Any]) -> LogitDifference:
    """Both models in float32 on random tokens: transformers' of `hf`, megatron's of the checkpoint and `config`.

    Raises: ConversionError when one of them cannot be loaded.
    """
    from mcore_rl.errors import McoreRLError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mcore_rl.megatron.model import parity

            return LogitDifference(*parity.compare_logits(hf, ckpt, config))
    except McoreRLError as error:
        raise ConversionError(str(error)) from error
