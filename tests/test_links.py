"""Links of the documentation into the source lead to the line of what they name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "check_links.py"


def run(*args: str | Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, TOOL, *args], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_every_link_of_the_documentation_is_true() -> None:
    code, said = run()
    assert code == 0, f"{said}To write the lines anew: make format"


def test_a_moved_line_is_told_and_mended_and_a_lost_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("import os\n\nclass A:\n    def go(self) -> None: ...\n")
    page = tmp_path / "page.md"
    page.write_text("[`A.go`](code.py#L1) and [`A`](code.py#L3), [`other`](code.py#L2)\n")
    code, said = run(page)
    assert code == 1
    assert "A.go is on line 4, not 1" in said
    assert "does not define other" in said
    assert "A is on" not in said
    code, said = run("--fix", page)
    assert code == 1  # the lost name is left
    assert page.read_text().startswith("[`A.go`](code.py#L4) and [`A`](code.py#L3), [`other`]")


def test_the_way_of_a_request_has_eight_steps_each_with_links() -> None:
    page = (ROOT / "docs/concepts/a-request.md").read_text(encoding="utf-8")
    steps = page.split("\n## ")[1:]
    assert [step[0] for step in steps] == list("12345678")
    assert all("../../src/quire/" in step for step in steps)
