"""`python -m mcore_rl.doctor`, which set-up asks before the command exists."""

import sys

from mcore_rl.doctor import main

sys.exit(main(sys.argv[1:]))
