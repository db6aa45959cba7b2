"""The fabric test, `mcore-rl doctor --node`: whether every device computes, copies and communicates as the others do.

Every node has a supervisor (supervisor) that starts a process per device (rank). Node 0's supervisor leads all ranks
through the stages (plan), one after the other, by notes on a board that every process reads and writes (board). What a
rank measures is in bench; what follows from the figures, and who is to blame, in verdict.
"""
