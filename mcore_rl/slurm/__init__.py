"""SLURM jobs: the job script rendered from the configuration, and the programs that it starts on each node."""
