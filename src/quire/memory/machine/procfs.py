"""Files of /proc and /sys, read so that what is missing, odd or gone is left out, not an error.

A process may leave its control group, and a kernel may lack a file, between two reads.
"""

from pathlib import Path

_MOST_IDS = 1 << 16  # more than any machine has processors or nodes


def read_text(path: Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def read_number(path: Path) -> int | None:
    """The one number in a file; None where there is none ("max")."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def read_table(path: Path) -> dict[str, int]:
    """The numbers of ``Name:   123 kB`` and ``name 123`` lines, in bytes.

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
    """The kernel's list of ids: ``0-2,5``. What is not a number is left out."""
    ids: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        if first.isdigit() and (last or first).isdigit() and int(last or first) < _MOST_IDS:
            ids.update(range(int(first), int(last or first) + 1))
    return frozenset(ids)
