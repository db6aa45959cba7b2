"""Fabric test, `mcore-rl doctor --node`: compares the speed of all devices, nodes and links, and checks results.

Every node runs a supervisor (supervisor), which starts one process per device (rank). Supervisors exchange the results
of each stage (plan) through a rendezvous store on node 0 (store), so that every node derives the same report (verdict).
"""
