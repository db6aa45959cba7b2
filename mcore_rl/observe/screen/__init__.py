"""Live screen of `mcore-rl train` in a terminal.

stages and counts of the driver --board--+
bytes of the checkpoint ------saving-----+--panels-+
printed lines ---------------capture-----+         +--> live: a thread that draws
run directory ---------------watch.snapshot, watch.frame
"""
