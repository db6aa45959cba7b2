"""`mcore-rl doctor`: checks the installation (checks, report) and the speed of devices and network (fabric).

Importing this package loads neither torch nor the checks.
"""

from mcore_rl.doctor.command import main

__all__ = ["main"]
