"""Grading outside the engine's process: dispatching, deadlines, and what is left of a grader that failed."""
