"""Commands that examine a part of a run: `train --dry-run` and `debug`."""
