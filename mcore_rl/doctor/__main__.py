"""`python -m mcore_rl.doctor`: used by the setup scripts before the `mcore-rl` command is installed."""

import sys

from mcore_rl.doctor import main

sys.exit(main(sys.argv[1:]))
