"""Rollouts beside training: groups that are submitted ahead of the step that trains them."""
