"""Asynchronous rollouts: groups are submitted ahead of the step that trains them."""
