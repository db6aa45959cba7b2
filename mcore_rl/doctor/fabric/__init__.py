"""Fabric test, `mcore-rl doctor --node`: compares the speed of all devices, nodes and links, and checks results.

Every node runs a supervisor (supervisor), which starts one process per device (rank). The ranks write the result of
each stage (plan) to a store on node 0 (rendezvous), from which every node derives the same report (report).
"""
