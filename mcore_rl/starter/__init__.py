"""First configuration of a user: five questions, the size of the machine, and a layout that `plan` accepts.

answers     the questions, their checks, and where answers come from
draft       keys, values and explanations for a machine
layout      layout of engines and trainer ranks
command     `mcore-rl init`
"""
