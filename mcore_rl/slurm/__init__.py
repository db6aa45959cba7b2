"""Runs on SLURM: a job script rendered from the configuration, and what it starts on each node."""
