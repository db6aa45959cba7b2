"""Training loops, run state and checkpoints. The loops fit on one screen and use Protocols only."""
