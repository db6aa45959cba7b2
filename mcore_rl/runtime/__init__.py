"""The only door to Ray: cluster, processes, groups of ranks, health. Everything else sees the Protocols of ports."""
