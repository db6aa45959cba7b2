"""Comparison of logits: Megatron's model of a checkpoint against transformers' model of the HF directory."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from model_converters.dcp.verify import LogitDifference
from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.size import reason_not_to_compare

Compare = Literal["auto", "always", "never"]


def should_compare(source: HFCheckpoint, logits: Compare, lora: Path | None) -> bool:
    """Decide whether a conversion compares logits. With "auto", print the reason if it does not.

    Raises: ConversionError for "always" if the source has an adapter or FP8 weights: transformers would not compute
    with the converted values.
    """
    if logits == "never":
        return False
    reason = None
    if lora is not None:
        reason = "transformers runs the HF model as it is, without --lora"
    elif source.quantisation:
        reason = f"transformers computes in {source.quantisation}, and the checkpoint has the dequantised weights"
    if logits == "always" and reason is not None:
        raise ConversionError(f"--logits always: {reason}")
    if logits == "auto" and reason is None and (size := reason_not_to_compare(source)):
        reason = f"{size}; use --logits always to compare them"
    if reason is not None:
        print(f"logits are not compared: {reason}", file=sys.stderr)
    return reason is None


def require_same_logits(hf: Path, ckpt: Path, config: dict[str, object]) -> None:
    """Compare the logits of both models and print the largest difference.

    Raises: ConversionError if they differ, or if transformers cannot load the model.
    """
    remedy = "nothing is written; use --logits never to convert without the comparison"
    try:
        difference = compare_logits(hf, ckpt, config)
    except ConversionError as error:
        raise ConversionError(f"--hf {hf}: {error}; {remedy}") from error
    if difference.problem is not None:
        raise ConversionError(
            f"--hf {hf}: logits {difference.problem}: with this config.json and these weights transformers and "
            f"megatron compute different models; {remedy}"
        )
    print(f"logits agree with transformers: the largest difference is {difference.max_abs_diff:.3g}")


def compare_logits(hf: Path, ckpt: Path, config: dict[str, object]) -> LogitDifference:
    """Run both models in float32 on random tokens: transformers on `hf`, Megatron on the checkpoint and `config`.

    Raises: ConversionError if either model cannot be loaded.
    """
    with megatron_errors():
        # Imported here: other commands do not need Megatron.
        from mcore_rl.megatron.model import parity

        return LogitDifference(*parity.compare_logits(hf, ckpt, config))


@contextmanager
def megatron_errors() -> Iterator[None]:
    """Raise errors of mcore_rl in the block as ConversionError, and ignore all warnings.

    Megatron warns about missing optional packages and about options without effect.
    """
    from mcore_rl.errors import McoreRLError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except McoreRLError as error:
        raise ConversionError(str(error)) from error
