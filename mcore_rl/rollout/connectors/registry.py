"""Connectors by kind. A library is imported when its connector is loaded."""

from __future__ import annotations

import functools

from mcore_rl.rollout.connectors.interface import Rows, Suite
from mcore_rl.rollout.connectors.libraries import check_library


@functools.cache
def load_suite(kind: str) -> Suite:
    """Return the suite of a kind. One object serves all sessions of a process.

    Raises: ConfigError if its package is missing or does not import.
    """
    check_library(kind)
    match kind:
        case "verifiers":
            from mcore_rl.rollout.connectors.verifiers import VerifiersSuite

            return VerifiersSuite()
        case "inspect":
            from mcore_rl.rollout.connectors.inspect import InspectSuite

            return InspectSuite()
        case _:
            from mcore_rl.rollout.connectors.lm_eval import LmEvalSuite

            return LmEvalSuite()


def load_rows(kind: str) -> Rows:
    """Return the source of a kind's rows. Raises: ConfigError if its package is missing or does not import."""
    check_library(kind)
    match kind:
        case "gymnasium":
            from mcore_rl.rollout.connectors.gymnasium import GymnasiumRows

            return GymnasiumRows()
        case "openenv":
            from mcore_rl.rollout.connectors.openenv import OpenEnvRows

            return OpenEnvRows()
        case _:
            return load_suite(kind)
