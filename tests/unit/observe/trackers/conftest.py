"""Trackers that scripts/setup_trackers.sh has installed."""

from __future__ import annotations

import sys

from tests.readme import ROOT

INSTALLED = ROOT / ".peers" / "trackers"
if INSTALLED.is_dir():
    # Last, so that shared packages are those of .venv.
    sys.path.append(str(INSTALLED))
