"""Grading in child processes: scheduling, time limits, and retries after a process has died."""
