"""The memory nodes of a machine, and which of them this process may take pages from."""

import re
from dataclasses import dataclass
from pathlib import Path

from quire.memory.machine.procfs import read_list, read_table, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One node that has memory."""

    node_id: int
    total_bytes: int
    available_bytes: int  # free, or file pages not in use
    allowed: bool  # to this process, by cpuset.mems


def numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """Every node with memory; empty where the kernel does not say.

    What ``numactl --membind`` forbids is a property of each mapping and is not seen here.
    """
    allowed = _allowed_nodes(root)
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node_id = int(folder.name.removeprefix("node"))
        meminfo = read_table(folder / "meminfo")
        if meminfo.get("MemTotal"):
            free = meminfo.get("MemFree", 0) + meminfo.get("Inactive(file)", 0)
            nodes.append(
                NumaNode(
                    node_id=node_id,
                    total_bytes=meminfo["MemTotal"],
                    available_bytes=free,
                    allowed=allowed is None or node_id in allowed,
                )
            )
    return tuple(sorted(nodes, key=lambda node: node.node_id))


def _allowed_nodes(root: Path) -> frozenset[int] | None:
    status = read_text(root / "proc/self/status")
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.MULTILINE)
    return read_list(found[1]) if found else None
