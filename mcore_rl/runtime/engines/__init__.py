"""Rollout engines: their processes, the fleet of them, and the scheduler of their tasks."""
