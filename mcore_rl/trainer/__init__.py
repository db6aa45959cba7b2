"""The loops, each on one screen; run state and checkpoints. Knows Protocols only, nothing concrete."""
