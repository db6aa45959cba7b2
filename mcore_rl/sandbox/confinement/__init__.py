"""Confinement of commands with bubblewrap or Landlock, resource limits, and termination of the process tree."""
