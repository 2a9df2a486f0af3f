"""The memory page: tokens a second while a viewer watches, and while none does.

One engine with the demo model; rounds without, with, and without again take turns, so that what
differs between the first and the last is noise (A/A). A viewer reads the feed in this process; with
``--browser`` it is a Chromium that draws the page, on the same processors. Tokens for a second of
the process's CPU time say it too where other work disturbs the clock; a browser's is not in it.
"""

import asyncio
import json
import os
import shutil
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Annotated, TypeAlias

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import typer
import uvicorn
from rich.console import Console
from rich.table import Table

from benchmarks.harness.quiet import no_collection
from benchmarks.harness.report import WithClaims
from quire import AsyncLLM, SamplingParams
from quire.config import ServerConfig
from quire.server.app import make_app
from quire.server.dashboard.feed import Feed

Watching: TypeAlias = Callable[[AsyncLLM], AbstractAsyncContextManager[None]]
TURNS = ("without", "with", "again")


def main(
    with_claims: WithClaims = False,
    browser: Annotated[bool, typer.Option("--browser", help="Watch with Chromium.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of each kind.")] = 9,
    num_seqs: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 384,
) -> None:
    measured = asyncio.run(_measure(browser, rounds, num_seqs, max_tokens))
    table = Table("tokens for a second of", "without", "with", "ratio", "A/A")
    claims: list[dict[str, object]] = []
    for index, name in enumerate(("the clock", "the processors")):
        rates = {turn: [pair[index] for pair in measured[turn]] for turn in TURNS}
        ratios = {turn: _median_ratio(rates[turn], rates["without"]) for turn in TURNS}
        medians = [f"{statistics.median(rates[turn]):,.0f}" for turn in ("without", "with")]
        table.add_row(name, *medians, f"{ratios['with']:.3f}", f"{ratios['again']:.3f}")
        claims.append({"claim": f"page: tokens a second of {name}", **ratios})
    Console().print(table)
    if with_claims:
        for claim in claims:
            print(json.dumps(claim))


async def _measure(
    browser: bool, rounds: int, num_seqs: int, max_tokens: int
) -> dict[str, list[tuple[float, float]]]:
    rates: dict[str, list[tuple[float, float]]] = {turn: [] for turn in TURNS}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    async with AsyncLLM(max_num_seqs=num_seqs, kv_cache_memory_bytes="512MB") as llm:
        prompts = [f"# Task {index}\ndef solve(values):\n" * 3 for index in range(num_seqs)]

        async def once() -> tuple[float, float]:
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await asyncio.gather(*(llm.complete(prompt, params) for prompt in prompts))
            took_s, used_s = time.perf_counter() - began_s, time.process_time() - cpu_s
            return num_seqs * max_tokens / took_s, num_seqs * max_tokens / used_s

        await once()  # kernels are compiled
        async with _chromium(llm) if browser else nullcontext() as page:
            with no_collection():
                for number in range(rounds):
                    for turn in TURNS if number % 2 else reversed(TURNS):
                        watching = page(llm) if page else _viewer(llm)
                        async with watching if turn == "with" else nullcontext():
                            rates[turn].append(await once())
    return rates


@asynccontextmanager
async def _viewer(llm: AsyncLLM) -> AsyncIterator[None]:
    """A viewer that reads the feed as fast as it comes."""

    async def read() -> None:
        async for _ in await Feed(llm).open():
            pass

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _chromium(llm: AsyncLLM) -> AsyncIterator[Watching]:
    """A browser, and a server for it; what it gives opens the page for a while."""
    from playwright.async_api import async_playwright

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(llm, ServerConfig()), log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    async with async_playwright() as playwright:
        own = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = await own.new_page(viewport={"width": 1280, "height": 900})

        @asynccontextmanager
        async def watching(_: AsyncLLM) -> AsyncIterator[None]:
            await page.goto(f"http://127.0.0.1:{listening.getsockname()[1]}/")
            await page.wait_for_selector(".link.live")
            try:
                yield
            finally:
                await page.goto("about:blank")

        yield watching
        await own.close()
    server.should_exit = True
    await serving


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    typer.run(main)
