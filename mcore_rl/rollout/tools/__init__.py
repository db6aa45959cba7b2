"""Tools that episodes call: how calls are read from text, what tools are, and the processes in which they run."""
