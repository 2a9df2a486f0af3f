"""What ours is compared with: where it is kept, and what is said where it cannot be had."""

from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".venv-peers"


class PeerUnavailable(RuntimeError):
    """The peer cannot be run here; the message says which step failed, and how."""
