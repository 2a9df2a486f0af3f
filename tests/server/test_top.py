"""``quire top``: the feed as text, from a server and from frames."""

import asyncio
import io
import os
import pty
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import uvicorn
from rich.console import Console
from typer.testing import CliRunner

from engine.test_llm import demo
from quire import AsyncLLM, SamplingParams
from quire.cli import command_line
from quire.cli.top import View
from quire.config import ServerConfig
from quire.server.app import make_app
from quire.server.dashboard.frames import (
    About,
    Cells,
    Counters,
    Frame,
    GroupAbout,
    Memory,
    SequenceFrame,
    TierFrame,
)
from server.asking import run

ABOUT = About(
    model="demo",
    strategy="paged",
    block_size=16,
    max_model_len=512,
    max_num_seqs=8,
    chats=False,
    rule="given",
    bound="kv_cache_memory_bytes",
    ledger=(),
    groups=(
        GroupAbout(
            label="full attention, 8 layers", cell_tokens=16, cell_bytes=1024, in_rows=False
        ),
    ),
)
NOTHING = Counters()


def a_frame(**changed: Any) -> Frame:
    sequences = tuple(
        SequenceFrame(
            id=number,
            state="running",
            tokens=40,
            prompt=32,
            computed=39,
            cached=16,
            max_tokens=132,
            preemptions=0,
            tables=((0, 3),),
        )
        for number in (4, 9)
    )
    frame = Frame(
        cells=(
            Cells(
                num_cells=8,
                num_shown=8,
                each=1,
                row_cells=0,
                counts=(1, 1, 1, 2, 1, 2),
                states="shhcre..",
                fills="99990000",
                holders=(4, 2, 9, 1, -1, 1, 9, 1, -1, 3),
            ),
        ),
        sequences=sequences,
        num_running=2,
        num_waiting=1,
        num_more=1,
        memory=Memory(
            reserved=8192, committed=6144, used=3072, cached=1024, ceiling=8192, capacity=8192
        ),
        counters=NOTHING,
        elastic="",
    )
    return msgspec.structs.replace(frame, **changed)


def text_of(view: View, width: int = 80) -> str:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_a_view_says_what_the_frame_says_in_eighty_columns() -> None:
    text = text_of(View("http://here", ABOUT, a_frame(), 0.0))
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "#ABo/_··" in lines
    assert "6.00 KiB committed of 8.00 KiB" in lines
    assert "2 running, 1 waiting   – tokens/s   hit rate –   0 preemptions" in lines
    assert "# 1 shared   A 2 held   / 1 spare   o 1 cached   _ 1 empty   · 2 not committed" in lines
    assert any(line.split()[:4] == ["A", "4", "running", "39/132"] for line in lines)
    assert "and 1 more" in text


def test_rates_are_of_the_last_seconds_and_letters_stay() -> None:
    view = View("http://here", ABOUT, a_frame(), 0.0)
    left = a_frame().sequences[1:]
    counted = Counters(queries=100, hits=75, generated=90, preemptions=2)
    later = view.then(a_frame(sequences=left, counters=counted), 2.0)
    text = text_of(later)
    assert "45 tokens/s   hit rate 75 %   2 preemptions" in text
    assert "\nB 9 " in text
    assert "reconnecting" in text_of(later.lost())


def test_a_tenant_has_its_own_rows_and_one_line_for_others() -> None:
    memory = Memory(reserved=2048, committed=2048, used=1024, cached=0, ceiling=8192, capacity=8192)
    frame = a_frame(counters=None, others_percent=35, memory=memory)
    text = text_of(View("http://here", ABOUT, frame, 0.0).then(frame, 1.0))
    assert "2.00 KiB committed of 8.00 KiB for this key" in text
    assert "1.00 KiB used   ▒ others about 35 %" in text
    assert "2 running, 1 waiting, of this key" in text
    assert text.split()[-5:] == ["others", "hold", "about", "35", "%"]


def test_tiers_have_a_line_each() -> None:
    memory = TierFrame(
        name="memory", state="ok", records=1234, used=2**20, capacity=2**30, hits=98_765
    )
    away = TierFrame(
        name="redis://store.example", state="broken", records=None, used=None, capacity=None, hits=0
    )
    view = View("http://here", ABOUT, a_frame(tiers=(memory, away)), 0.0)
    lines = [line.rstrip() for line in text_of(view).splitlines()]
    assert "memory: 1.00 MiB of 1.00 GiB in 1,234 records, 98,765 tokens hit, ok" in lines
    assert "redis://store.example: bytes unknown, 0 tokens hit, broken" in lines
    many = a_frame(tiers=(memory,) * 4 + (away,) * 2)
    assert "and 2 tiers more, 2 of them broken or suspect" in text_of(
        View("http://here", ABOUT, many, 0.0)
    )
    screen = io.StringIO()
    terminal = {"force_terminal": True, "color_system": None, "width": 80, "height": 24}
    Console(file=screen, **terminal).print(View("http://here", ABOUT, many, 0.0))
    assert len(screen.getvalue().splitlines()) <= 24


def many_cells(holder: int) -> Cells:
    """A quarter of them held by one sequence, ten cells a sign."""
    return Cells(
        num_cells=40_000,
        num_shown=40_000,
        each=10,
        row_cells=0,
        counts=(0, 0, 0, 9_900, 0, 30_100),
        states="h" * 1000 + "." * 3000,
        fills="9" * 4000,
        holders=(holder, 1000, -1, 3000),
    )


def test_a_large_picture_is_thinned() -> None:
    cells = many_cells(4)
    lines = text_of(View("http://here", ABOUT, a_frame(cells=(cells,)), 0.0)).splitlines()
    assert sum("··" in line or "AA" in line for line in lines if "committed" not in line) <= 16
    assert any("40 cells a sign" in line for line in lines)
    assert "A 9,900 held   · 30,100 not committed" in [line.rstrip() for line in lines]


@pytest.mark.parametrize(("num_listed", "num_more", "said"), [(12, 0, ""), (40, 7, "35 more")])
def test_a_terminal_of_80_by_24_is_filled_and_not_passed(
    num_listed: int, num_more: int, said: str
) -> None:
    like = a_frame().sequences[0]
    sequences = [msgspec.structs.replace(like, id=1000 + number) for number in range(num_listed)]
    cells = many_cells(1004)
    frame = a_frame(sequences=tuple(sequences), cells=(cells,), num_more=num_more)
    screen = io.StringIO()
    terminal = {"force_terminal": True, "color_system": None, "width": 80, "height": 24}
    Console(file=screen, **terminal).print(View("http://here", ABOUT, frame, 0.0))
    text = screen.getvalue()
    assert 22 <= len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    assert sum(str(sequence.id) in text for sequence in sequences) == 12
    assert ("more" in text) == bool(said)
    assert said in text


TOP = """
import os, sys, termios, tty
from quire.cli import main

before = termios.tcgetattr(0)
try:
    main()
finally:
    assert termios.tcgetattr(0) == before
    print("as it was")
"""


def top_ended_by(url: str, key: bytes | signal.Signals) -> tuple[int, str]:
    """What a terminal shows of it, and its exit code."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", TOP, "top", "--url", url, "--api-key", "root"]
    size = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=size) as child:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the end of what a terminal shows
            while piece := os.read(ours, 65536):
                shown += piece
                if b"hit rate" in shown and key:
                    if isinstance(key, bytes):
                        os.write(ours, key)
                    else:
                        child.send_signal(key)
                    key = b""
    os.close(ours)
    return child.returncode, shown.decode()


def test_a_server_is_asked_once_and_watched_until_a_key() -> None:
    async def body() -> None:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with AsyncLLM(demo(), max_model_len=256, kv_cache_memory_bytes="8MB") as llm:
            await llm.complete("def f(x):\n    return x\n" * 4, SamplingParams(max_tokens=8))
            served = make_app(llm, ServerConfig(api_key=("sesame",), admin_api_key=("root",)))
            server = uvicorn.Server(uvicorn.Config(served, log_config=None))
            serving = asyncio.create_task(server.serve([listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            command = ["top", "--url", url, "--once"]
            refused = await asyncio.to_thread(CliRunner().invoke, command_line(["top"]), command)
            assert "an API key is needed" in str(refused.exception)
            for key, has, has_not in (
                ("root", "cached", "others"),
                ("sesame", "others", "KiB cached"),
            ):
                keyed = [*command, "--api-key", key]
                shown = await asyncio.to_thread(CliRunner().invoke, command_line(["top"]), keyed)
                assert shown.exit_code == 0, shown.exception
                assert "demo, paged" in shown.output
                assert has in shown.output
                assert has_not not in shown.output
                assert "0 running, 0 waiting" in shown.output
            for pressed, code in ((b"xq", 0), (signal.SIGTERM, 128 + signal.SIGTERM)):
                ended, text = await asyncio.to_thread(top_ended_by, url, pressed)
                assert (ended, "as it was" in text) == (code, True), text
                assert "Traceback" not in text
            server.should_exit = True
            await serving
        listening.close()

    run(body())


def test_where_no_server_is_it_says_so() -> None:
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unserved.getsockname()[1]}"
        found = CliRunner().invoke(command_line(["top"]), ["top", "--url", url, "--once"])
    assert f"no memory feed at {url} (All connection attempts failed)" in str(found.exception)
