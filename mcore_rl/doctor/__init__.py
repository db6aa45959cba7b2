"""`mcore-rl doctor`: checks the installation (checks, report) and the speed of devices and network (fabric).

Importing this package loads neither torch nor the checks.
"""
