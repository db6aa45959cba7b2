"""Execution of model-written programs for the code graders."""
