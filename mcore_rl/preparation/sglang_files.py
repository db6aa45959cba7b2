"""Check that SGLang's environment has the packages for a URL of files, which its ranks read themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mcore_rl.config.rules.engine_support import sglang_python
from mcore_rl.errors import ConfigError

ROOT = Path(__file__).parents[2]
"""Folder of this package, which SGLang's environment does not have."""
_OPEN = """
import sys
from mcore_rl.errors import ConfigError
from mcore_rl.remote.shared_folder import SharedFolder
try:
    SharedFolder(*sys.argv[1:])
except ConfigError as error:
    sys.exit(f"{error}")
"""


def check_sglang_files(key: str, url: str) -> None:
    """Open a folder of files with SGLang's interpreter. `key`: configuration key of the URL.

    Raises: ConfigError naming the missing package and the environment.
    """
    python = sglang_python()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PYTHONPATH"] = str(ROOT)
    opened = subprocess.run(
        [str(python), "-c", _OPEN, key, url], env=environment, capture_output=True, text=True, check=False
    )
    if opened.returncode:
        lines = opened.stderr.strip().splitlines() or [f"{python} ended with exit code {opened.returncode}"]
        raise ConfigError(f"rollout.engine=sglang reads {key} itself: {lines[-1]}")
