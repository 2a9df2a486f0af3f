"""Files of /proc and /sys, read so that what is missing, odd or gone is left out, not an error.

A process may leave its control group, and a kernel may lack a file, between two reads.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_MOST_IDS = 1 << 16  # more than any machine has processors or nodes


def read_text(path: Path) -> str:
    """Read a file's text; empty where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def read_number(path: Path) -> int | None:
    """Read the one number in a file; None where there is none ("max")."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def read_table(path: Path) -> dict[str, int]:
    """Read the numbers of ``Name:   123 kB`` and ``name 123`` lines, in bytes.

    A node's ``Node 0 MemTotal:   123 kB`` counts as ``MemTotal``.
    """
    table = {}
    for line in read_text(path).splitlines():
        fields = line.split()
        if fields[:1] == ["Node"]:
            fields = fields[2:]
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0].rstrip(":")] = int(fields[1]) * (1024 if fields[-1] == "kB" else 1)
    return table


def read_list(text: str) -> frozenset[int]:
    """Parse the kernel's list of ids, ``0-2,5``, and leave out what is not a number."""
    ids: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        if first.isdigit() and (last or first).isdigit() and int(last or first) < _MOST_IDS:
            ids.update(range(int(first), int(last or first) + 1))
    return frozenset(ids)


# -- numa ------------------------------------------------------------------------------------------

# The memory nodes of a machine, and which of them this process may take pages from.


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One node that has memory."""

    node_id: int
    total_bytes: int
    available_bytes: int  # free, or file pages not in use
    allowed: bool  # to this process, by cpuset.mems


def numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """Read every node with memory; empty where the kernel does not say.

    ``numactl --membind`` is a property of each mapping, which these files do not show.
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
