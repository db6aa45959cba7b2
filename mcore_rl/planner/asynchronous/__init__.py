"""What `mcore-rl plan` says of runs whose engines generate while the trainer updates."""
