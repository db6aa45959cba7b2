"""`mcore-rl doctor`: what is installed and missing (checks, report), and whether the nodes compute and communicate as
they should (fabric). Importing it loads neither torch nor the checks."""

from mcore_rl.doctor.command import main

__all__ = ["main"]
