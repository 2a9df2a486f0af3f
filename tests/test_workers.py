"""Tests that run in several processes are all told of, as one process would tell it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workers

CONFTEST = f"""
import sys
sys.path.insert(0, {os.path.dirname(workers.__file__)!r})
import workers

def pytest_addoption(parser):
    workers.add_option(parser)

def pytest_runtestloop(session):
    return workers.run_all(session)

def pytest_sessionfinish(session, exitstatus):
    workers.note_end(session, exitstatus)
"""
PASSES = "def test_passes(number): print('unheard')\n"
FILE = "import os, time, pytest\n@pytest.mark.parametrize('number', range(4))\n" + PASSES


def run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, more in files.items():
        (folder / f"test_{name}.py").write_text(FILE + more)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(folder), str(folder)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_each_test_is_told_of_once_and_with_what_it_said(tmp_path: Path) -> None:
    code, said = run(
        tmp_path, "--workers=2", "-rs", a="", b="def test_skips(): pytest.skip('not here')\n",
        c="def test_fails(): os.system('echo of a child'); assert 1 == 2\n",
    )  # fmt: skip
    assert code == 1
    assert re.search(r"1 failed, 12 passed, 1 skipped in", said)
    assert "assert 1 == 2" in said
    assert "of a child" in said
    assert "not here" in said
    assert "unheard" not in said


# One that waits until a test of the other file has begun, and says who it is.
MEETS = """
@pytest.mark.parametrize('turn', range(3))
def test_meets(turn, request):
    folder = request.path.parent
    with open(folder / f'{request.path.stem}.ran', 'a') as file:
        print(turn, os.getpid(), file=file)
    until = time.monotonic() + 30
    while len([*folder.glob('*.ran')]) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
"""


def test_a_file_stays_whole_beside_another(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--workers=2", a=MEETS, b=MEETS)
    assert code == 0, said
    ran = [[*map(str.split, file.read_text().splitlines())] for file in tmp_path.glob("*.ran")]
    assert [[turn for turn, _ in of] for of in ran] == [["0", "1", "2"]] * 2
    one, other = ({pid for _, pid in of} for of in ran)
    assert len(one) == len(other) == 1
    assert one != other


@pytest.mark.parametrize("options", [("-x",), ()])
def test_a_process_that_dies_fails_the_session_and_is_named(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    code, said = run(
        tmp_path, "--workers=2", *options, a="", b="def test_dies(): os.kill(os.getpid(), 9)\n"
    )
    assert code
    assert "its process ended with -9 while it ran: test_b.py::test_dies" in said


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    code, _ = run(tmp_path, "--workers=0", a="")
    assert code == pytest.ExitCode.USAGE_ERROR
