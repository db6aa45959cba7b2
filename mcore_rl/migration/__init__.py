"""Import of other trainers' launch scripts and configurations: `mcore-rl import-verl`, `mcore-rl import-slime`."""
