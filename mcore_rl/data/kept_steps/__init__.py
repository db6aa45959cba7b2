"""Batches of trained steps in files of the run directory, for `mcore-rl debug train`.

trajectories/step_<n>/responses.safetensors   scalars of the trained responses, written by the driver
trajectories/step_<n>/rank_<dp>.safetensors   trajectories of a data-parallel rank, written by one of its processes
"""
