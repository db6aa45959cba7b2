"""Fabric test of one node of a SLURM job: `python -m mcore_rl.slurm.fabric_node`, as a task on every node.

The first node opens the store on a free port, publishes its address as ATTEMPT/fabric_address, and prints the report.
Every node that is not blamed creates ATTEMPT/sound/NODE. The last line of output is the node's verdict.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mcore_rl.doctor.fabric.rendezvous import Address, NodePlace, open_place
from mcore_rl.doctor.fabric.supervisor import START_TIMEOUTS, exit_if_unkillable, supervise
from mcore_rl.errors import McoreRLError
from mcore_rl.slurm.meeting import address_here, is_first, node_name, parse_options, publish, put_name, wait_for


def main() -> int:
    """Run the test. Returns the exit code: 1 if this node is blamed or the test could not run, otherwise 0."""
    numbers = {"nodes": "number of nodes", "slots": "ranks per node", "timeout-seconds": "timeout of each stage"}
    options = parse_options(__doc__, {**numbers, "slow-percent": "see mcore-rl doctor --slow-percent"})
    try:
        place = _place(options.attempt / "fabric_address", options.nodes, START_TIMEOUTS * options.timeout_seconds)
        report = supervise(place, options.slots, options.timeout_seconds, options.slow_percent)
    except McoreRLError as error:
        print(f"{node_name()}: {error}")
        return 1
    if place.index == 0:
        print(report.as_text())
    problem = report.blamed().get(node_name())
    if problem is None:
        put_name(options.attempt / "sound")
    print(f"{node_name()}: {problem or 'sound'}", flush=True)
    exit_code = 0 if problem is None else 1
    exit_if_unkillable(exit_code)
    return exit_code


def _place(path: Path, num_nodes: int, seconds: float) -> NodePlace:
    if is_first():
        place = open_place(0, num_nodes, node_name(), Address(address_here(), 0))
        publish(str(place.address), path)
        return place
    host, _, port = (wait_for(path, time.monotonic() + seconds) or "").rpartition(":")
    return open_place(int(os.environ["SLURM_NODEID"]), num_nodes, node_name(), Address(host, int(port)))


if __name__ == "__main__":
    sys.exit(main())
