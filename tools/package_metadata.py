"""What a package index shows: the README with links that hold there, and the project's addresses.

Hatchling calls this when it builds (``[tool.hatch.metadata.hooks.custom]`` in ``pyproject.toml``).
On an index the README is alone: its pictures and pages are in the repository. With ``repository``
set, its relative links become addresses there. Without, a picture is left out and a link becomes
its text, so that nothing is dead.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def on_an_index(readme: str, repository: str) -> str:
    """Return a README for a reader who does not have the source.

    Args:
        readme: Markdown with links that are relative to the repository's root.
        repository: The address of the repository's web page (``https://host/owner/name``), or "".
    """

    def link(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if not repository:
            return "" if picture else text
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/main/{path})"

    return _LINK.sub(link, readme)


class PackageMetadata(MetadataHookInterface):
    """Fill in ``readme`` and ``urls``, which ``pyproject.toml`` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README and the addresses to what the package says of itself."""
        repository = self.config.get("repository", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": on_an_index(text, repository),
        }
        metadata["urls"] = {
            name: f"{repository}/{path}".rstrip("/")
            for name, path in (
                ("Source", ""),
                ("Documentation", "blob/main/docs/index.md"),
                ("Changelog", "blob/main/CHANGELOG.md"),
                ("Issues", "issues"),
            )
            if repository
        }
