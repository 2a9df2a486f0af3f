"""Memory of a GPU by the driver's virtual memory: cost of each call, layouts of decode attention.

Without a GPU it says so and ends. ``--emulated`` runs all of it, small, on the tests' emulator of
the driver: that shows that the bookkeeping is right, and its times mean nothing.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from cuda_layouts import Geometry, compare
from rich.console import Console
from rich.table import Table

from quire.errors import QuireError
from quire.memory.cuda import CudaMemory
from quire.memory.cuda.driver import Driver, DriverFunctions, load_driver_functions
from quire.units import format_bytes

MIB = 2**20
QWEN3_4B = Geometry()
TINY = Geometry(num_layers=12, num_kv_heads=2, num_groups=2, head_dim=16)
GRID = ((1, 1024), (1, 8192), (1, 32768), (16, 1024), (16, 8192), (64, 1024), (64, 4096))


def call_costs(
    driver: Driver, page_bytes: int, count: int, wait: Callable[[], object]
) -> list[str]:
    """Microseconds a call with pages of this size, and what came back at the end."""
    span, half = page_bytes * count, count // 2
    free_before, _ = driver.free_and_total()

    def timed(calls: int, run: Callable[[], object]) -> str:
        wait()
        begun = time.perf_counter()
        run()
        return f"{(time.perf_counter() - begun) * 1e6 / calls:.1f}"

    handles: list[object] = []
    own, other = (driver.reserve(span, page_bytes) for _ in range(2))

    def each(call: Callable[[int], object], numbers: range) -> None:
        for number in numbers:
            call(number * page_bytes)

    def mapped(start: int) -> None:
        for number, handle in enumerate(handles):
            driver.map(start + number * page_bytes, page_bytes, handle)

    row = [format_bytes(page_bytes), str(count)]
    row.append(
        timed(count, lambda: handles.extend(driver.create(page_bytes) for _ in range(count)))
    )
    row.append(timed(count, lambda: mapped(own)))
    row.append(
        timed(half, lambda: each(lambda at: driver.allow(own + at, page_bytes), range(half)))
    )
    row.append(timed(1, lambda: driver.allow(own + half * page_bytes, (count - half) * page_bytes)))
    row.append(timed(count, lambda: mapped(other)))
    driver.allow(other, span)
    row.append(timed(1, lambda: (driver.zero(own, span), wait())))
    wait()
    row.append(
        timed(half, lambda: each(lambda at: driver.unmap(other + at, page_bytes), range(half)))
    )
    row.append(timed(1, lambda: driver.unmap(other + half * page_bytes, span - half * page_bytes)))
    driver.unmap(own, span)
    row.append(timed(count, lambda: [driver.release(handle) for handle in handles]))
    for start in (own, other):
        driver.free(start, span)
    row.append(format_bytes(free_before - driver.free_and_total()[0]))
    return row


def sessions(
    memory: CudaMemory, driver: Driver, geometry: Geometry, layouts: tuple[int, ...], whole: int
) -> Iterator[tuple[int, int, int, int]]:
    """(layers a page, bytes taken from the device by 100 tokens, computed, not given back)."""
    for layers in layouts:
        packing = geometry.packing(layers, memory.page_bytes)
        before, _ = driver.free_and_total()
        stream_bytes = packing.stream_bytes * whole
        stride = -(-stream_bytes // memory.page_bytes) * memory.page_bytes
        region = memory.reserve(stride * packing.num_streams)
        pages = packing.committed_bytes(100) // packing.num_streams
        region.commit(0, pages, stride=stride, count=packing.num_streams)
        taken = before - driver.free_and_total()[0]
        region.close()
        memory.trim()
        left = before - driver.free_and_total()[0]
        yield layers, taken, packing.committed_bytes(100), left


def is_seen_twice(memory: CudaMemory, device: str) -> bool:
    """What is written at one address is read at another by later work."""
    page = memory.page_bytes
    region = memory.reserve(2 * page, heap_bytes=2 * page)
    region.commit(0, 2 * page)
    window = region.window(page)
    window.map(0, page, page)
    region.tensor(torch.uint8)[page:].fill_(7)
    if device == "cuda":
        torch.cuda.synchronize()
    seen = bool(window.tensor(torch.uint8).eq(7).all().item())
    region.close()
    return seen


def claim(name: str, ours: float, peer: float | None, unit: str, goal: str, holds: bool) -> str:
    ratio = round(ours / peer, 5) if peer else None
    fields = {"claim": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio}
    return json.dumps({**fields, "goal": goal, "holds": holds})


def table(title: str, columns: str, rows: Iterator[tuple[str, ...]] | list[list[str]]) -> Table:
    made = Table(*columns.split(" | "), title=title, title_justify="left")
    for row in rows:
        made.add_row(*row)
    return made


app = typer.Typer(add_completion=False)


@app.command()
def main(
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Run all of it, small, without a GPU.")
    ] = False,
    with_claims: Annotated[
        bool, typer.Option("--claims", help="End with one JSON object a line for each claim.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Turns of the layouts of attention.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the random keys and values.")] = 0,
) -> None:
    """Cost of each call of the driver, bytes of a session, decode attention in several layouts."""
    torch.manual_seed(seed)
    console = Console(width=None if sys.stdout.isatty() else 160)
    functions: DriverFunctions
    if emulated:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver

        functions = EmulatedDriver(total_bytes=512 * MIB)
        device, tensor_device, sizes, geometry, grid = (
            "cpu",
            TENSOR_DEVICE,
            (1, 2),
            TINY,
            ((2, 64),),
        )
        console.print("No GPU is used: an emulator of the driver. The times mean nothing.")
    else:
        if not torch.cuda.is_available():
            console.print(
                "There is no GPU here, so nothing was measured (--emulated runs without)."
            )
            return
        functions = load_driver_functions()
        device, tensor_device, sizes, geometry, grid = "cuda", None, (1, 2, 8, 32), QWEN3_4B, GRID
        torch.zeros(1, device="cuda")
        console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {seed}")
    try:
        driver = Driver(functions, 0, 0)
        memory = CudaMemory(driver=functions, tensor_device=tensor_device)
    except QuireError as error:
        console.print(f"Nothing was measured: {error}")
        return

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    page = memory.page_bytes
    budget = min(8 * 2**30, driver.free_and_total()[0] // 2)
    costs = [call_costs(driver, page * n, min(256, budget // (page * n)), wait) for n in sizes]
    columns = "page | pages | create | map | access, each | access, one call | map again"
    columns += " | zero all | unmap, each | unmap, one call | release | left after release"
    console.print(table("Microseconds a call", columns, costs))

    layouts, whole = (1, 4, 6, geometry.num_layers), 40_960 if device == "cuda" else 1024
    held = list(sessions(memory, driver, geometry, layouts, whole))
    console.print(
        table(
            "100 tokens of one sequence",
            "layers a page | taken | computed | left after release",
            [[str(layers), *map(format_bytes, counted)] for layers, *counted in held],
        )
    )
    coherent = is_seen_twice(memory, device)
    console.print(f"What is written at one address is seen at another: {coherent}")
    columns = "kernel | B | T | layout | ms | GB/s | speed beside one tensor"
    rows = compare(memory, device, geometry, layouts, grid, rounds)
    console.print(table("Decode attention, all layers", columns, rows))
    if with_claims:
        for line in claims(held, geometry, whole, coherent):
            print(line)


def claims(
    held: list[tuple[int, int, int, int]], geometry: Geometry, whole: int, coherent: bool
) -> Iterator[str]:
    reserved = whole * geometry.token_bytes / MIB
    for layers, taken, _, _ in held:
        if layers in (4, geometry.num_layers):
            name = f"100 tokens at {whole} maximum, {layers} layers a page"
            ours = round(taken / MIB, 3)
            yield claim(name, ours, reserved, "MiB", "<= 18", taken <= 18 * MIB)
    left = max(left for *_, left in held)
    yield claim("left at the driver's after release", left, None, "bytes", "== 0", left == 0)
    name = "a page is seen at two addresses"
    yield claim(name, float(coherent), None, "true", "== 1", coherent)


if __name__ == "__main__":
    app()
