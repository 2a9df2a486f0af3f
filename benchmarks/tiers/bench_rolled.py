"""A server that is rolled under load: what is found afterwards, and which streams broke.

    python -m benchmarks.tiers.bench_rolled

Clients hold conversations with ``quire serve``: turn after turn with what was said before, each a
stream. Then the server is replaced, as a supervisor does it:

    rolled      a second server opens, clients turn to it, and the first gets SIGTERM
    restarted   SIGTERM; once that process has ended, a new one is started
    killed      SIGKILL, and a new one

each with a file tier, and rolled without one. The share of prompt tokens that were found
(``cached_tokens`` of ``usage``) is counted before, and in the first ``seconds`` of traffic after. A
client that is refused, or cut off before the first piece, asks again, as an HTTP client does; one
that is cut off later has a broken stream.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated, Any

import httpx
import typer

from benchmarks.engine.model import make
from benchmarks.harness.os_memory import machine
from benchmarks.harness.report import Output, Table, markdown, replace_section
from benchmarks.harness.server import ServerProcess, server
from quire.http import Http, RefusedByServer

KINDS = ("rolled", "restarted", "killed", "rolled, no tier")
GOAL = 0.9  # of the share before
MOST_AT_ONCE = 16  # sequences that run
WINDOW_S = 10.0  # in which a share is looked at, to say when it is back
AGAIN_S = 0.1  # until a client that was refused asks again
LARGE = Path(tempfile.gettempdir()) / "quire-bench-model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The conversations. Lengths are in tokens."""

    clients: int
    prefixes: int  # system prompts, of which each conversation has one
    prefix_tokens: int
    turns: int  # of a conversation; then its client begins another
    turn_tokens: int  # that a user adds
    answer_tokens: int
    think_s: float  # on average, between an answer and the next turn
    vocab: range = range(20, 4000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One stream. Times are by ``perf_counter``."""

    pid: int  # of the server that gave its last piece
    began_s: float  # when the client first asked
    first_s: float
    num_refused: int  # before it was let in
    num_cut_off: int  # … without a piece of an answer
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None


@dataclass(slots=True)
class Traffic:
    """Clients, which ask the server that is in front now. A thread of its own runs them."""

    load: Load
    seed: int
    front: ServerProcess
    done: list[Turn] = field(default_factory=list)
    is_over: bool = False

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Have the clients ask until the end of the block, and finish what they have begun."""
        thread = threading.Thread(target=lambda: asyncio.run(self._all()))
        thread.start()
        try:
            yield
        finally:
            self.is_over = True
            thread.join()

    async def _all(self) -> None:
        await asyncio.gather(*map(self._client, range(self.load.clients)))

    async def _client(self, number: int) -> None:
        load, draw = self.load, random.Random(f"{self.seed} {number}")

        def drawn(name: object, count: int) -> list[int]:
            own = random.Random(f"{self.seed} {name}")
            return [own.choice(load.vocab) for _ in range(count)]

        prefixes = [drawn(f"prefix {i}", load.prefix_tokens) for i in range(load.prefixes)]
        await asyncio.sleep(draw.random() * load.think_s)
        talk = 0
        while not self.is_over:
            talk += 1
            said, begin = (
                list(draw.choice(prefixes)),
                draw.randrange(load.turns) if talk == 1 else 0,
            )
            for turn in range(begin, load.turns):  # the first ones are not all at one place
                said += drawn(f"{number} {talk} {turn}", load.turn_tokens)
                said += await self._ask(said)
                await asyncio.sleep(draw.expovariate(1 / load.think_s))
                if self.is_over:
                    return

    async def _ask(self, prompt: list[int]) -> list[int]:
        """Ask until there is an answer. Returns: its tokens."""
        body = {
            "model": "rolled", "prompt": prompt, "max_tokens": self.load.answer_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        began_s, refused, cut_off = perf_counter(), 0, 0
        while True:
            front, answer, first_s = self.front, list[int](), 0.0
            found: dict[str, Any] = {}
            try:
                events = Http(f"http://127.0.0.1:{front.port}", timeout_s=300).events(
                    "/v1/completions", body
                )
                async with aclosing(events):
                    async for data in events:
                        event = json.loads(data)
                        if usage := event.get("usage"):
                            found["prompt_tokens"] = usage["prompt_tokens"]
                            details = usage.get("prompt_tokens_details") or {}
                            found["cached_tokens"] = details.get("cached_tokens", 0)
                        for choice in event["choices"]:
                            first_s = first_s or perf_counter()
                            answer += choice.get("token_ids") or ()
                            if reason := choice["finish_reason"]:
                                found["finish_reason"] = reason
            except (OSError, ValueError) as error:
                if not first_s:
                    is_refused = isinstance(error, RefusedByServer) or isinstance(
                        error.__cause__, httpx.ConnectError
                    )
                    refused, cut_off = refused + is_refused, cut_off + (not is_refused)
                    await asyncio.sleep(AGAIN_S)
                    continue
            self.done.append(
                Turn(
                    pid=front.pid, began_s=began_s, first_s=first_s, num_refused=refused,
                    num_cut_off=cut_off, **found,
                )
            )  # fmt: skip
            return answer


def share(turns: list[Turn]) -> float:
    """Of these prompts' tokens, that were found."""
    return sum(turn.cached_tokens for turn in turns) / max(1, sum(t.prompt_tokens for t in turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one server's replacement."""

    before: float
    after: float
    at_first: float  # in the first WINDOW_S
    back_s: float | None  # of traffic, until WINDOW_S of it have GOAL of the share before
    away_s: float  # from the first server's end (or the turn to the second) to an answer's piece
    num_before: int
    num_after: int
    num_broken: int
    num_again: int  # streams that were refused or cut off before their first piece
    num_cut_off: int  # … of these, cut off
    first_before_s: float  # median
    first_after_s: float

    @property
    def ratio(self) -> float:
        return self.after / max(1e-9, self.before)


def outcome(traffic: Traffic, first: int, replaced_s: float, seconds: float) -> Outcome:
    """Count. ``first``: the first server's process id."""
    old = [t for t in traffic.done if t.pid == first and t.first_s < replaced_s]
    before = [turn for turn in old if turn.began_s > replaced_s - seconds]
    new = sorted((t for t in traffic.done if t.pid != first), key=lambda turn: turn.first_s)
    opened_s = new[0].first_s
    after = [turn for turn in new if turn.first_s < opened_s + seconds]
    back_s = None
    for turn in after:
        lately = [t for t in after if turn.first_s - WINDOW_S < t.first_s <= turn.first_s]
        if turn.first_s - opened_s >= WINDOW_S and share(lately) >= GOAL * share(before):
            back_s = turn.first_s - opened_s
            break
    return Outcome(
        before=share(before),
        after=share(after),
        at_first=share([turn for turn in after if turn.first_s < opened_s + WINDOW_S]),
        back_s=back_s,
        away_s=opened_s - replaced_s,
        num_before=len(before),
        num_after=len(after),
        num_broken=sum(turn.finish_reason not in ("length", "stop") for turn in traffic.done),
        num_again=sum(turn.num_refused + turn.num_cut_off > 0 for turn in traffic.done),
        num_cut_off=sum(turn.num_cut_off > 0 for turn in traffic.done),
        first_before_s=statistics.median(turn.first_s - turn.began_s for turn in before),
        first_after_s=statistics.median(turn.first_s - turn.began_s for turn in after),
    )


def replace_server(
    kind: str, flags: list[str], load: Load, seed: int, seconds: float, warm_s: float, log: Path
) -> Outcome:
    """Have a server asked, replace it, and have the next one asked."""
    with ExitStack() as first, ExitStack() as second:
        own = first.enter_context(server(*flags, log=log.with_suffix(".1")))
        traffic = Traffic(load, seed, own)
        with traffic.coming():
            sleep(warm_s + seconds)
            if kind.startswith("rolled"):
                traffic.front = second.enter_context(server(*flags, log=log.with_suffix(".2")))
                replaced_s = perf_counter()
                first.close()
            else:
                replaced_s = perf_counter()
                if kind == "killed":
                    os.kill(own.pid, signal.SIGKILL)
                first.close()  # SIGTERM, and wait until it has ended
                traffic.front = second.enter_context(server(*flags, log=log.with_suffix(".2")))
            while not any(turn.pid == traffic.front.pid for turn in list(traffic.done)):
                sleep(0.1)
            sleep(seconds)
    return outcome(traffic, own.pid, replaced_s, seconds)


def main(  # noqa: PLR0913 - each is a flag
    kinds: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(KINDS),
    rounds: int = 1,
    seconds: Annotated[float, typer.Option(help="Of traffic, before and after.")] = 60.0,
    warm_s: Annotated[float, typer.Option(help="Of traffic before those.")] = 40.0,
    large: Annotated[bool, typer.Option(help="The 0.45 B model, not the demo model.")] = False,
    write: Annotated[str, typer.Option(help="--kv-tier-write.")] = "auto",
    clients: int = 48,
    turns: int = 8,
    turn_tokens: int = 120,
    answer_tokens: int = 40,
    prefix_tokens: int = 200,
    think_s: float = 20.0,
    kv: Annotated[str, typer.Option(help="--kv-cache-memory-bytes.")] = "512MiB",
    shutdown_timeout: Annotated[float, typer.Option(help="Of the servers; below 60.")] = 30.0,
    seed: int = 0,
    logs: Annotated[Path | None, typer.Option(help="Folder for what the servers say.")] = None,
    output: Output = None,
) -> None:
    """Print for each kind what was found before and after, and the streams that broke."""
    load = Load(
        clients=clients, prefixes=3, prefix_tokens=prefix_tokens, turns=turns,
        turn_tokens=turn_tokens, answer_tokens=answer_tokens, think_s=think_s,
    )  # fmt: skip
    context = prefix_tokens + turns * (turn_tokens + answer_tokens) + 16
    flags = [*([str(make(LARGE))] if large else []), "--served-model-name", "rolled",
             "--max-model-len", str(context), "--kv-cache-memory-bytes", kv,
             "--max-num-seqs", str(min(clients, MOST_AT_ONCE)),
             "--shutdown-timeout", str(shutdown_timeout), "--kv-tier-write", write,
             "--uvicorn-log-level", "warning"]  # fmt: skip
    chosen = [kind.strip() for kind in kinds.split(";")]
    found: dict[str, list[Outcome]] = {kind: [] for kind in chosen}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for kind in chosen:
                blocks = Path(folder) / "blocks"
                tier = [] if "no tier" in kind else ["--kv-tier", f"file:{blocks}?size=8GiB"]
                own = flags if tier else flags[: flags.index("--kv-tier-write")] + flags[-2:]
                log = Path(logs or folder) / f"{kind.replace(', ', '-')}-{number}"
                found[kind].append(
                    replace_server(kind, [*own, *tier], load, seed + number, seconds, warm_s, log)
                )
                shutil.rmtree(blocks, ignore_errors=True)
                typer.echo(f"{kind}: {found[kind][-1]}", err=True)
    table = _table(found, seconds)
    setting = (
        f"{machine()}; {'the 0.45 B model' if large else 'the demo model'}, {clients} clients, "
        f"conversations of {turns} turns: {turn_tokens} tokens asked and {answer_tokens} answered "
        f"behind one of 3 prefixes of {prefix_tokens}, {think_s:g} s between; {seconds:g} s of "
        f"traffic before and after; "
        f"--kv-tier-write {write}, --shutdown-timeout {shutdown_timeout:g}; seed {seed}, "
        f"{rounds} rounds."
    )
    print(text := markdown([table], [], setting))
    if output is not None:
        replace_section(output, f"bench_rolled{', large' if large else ''}", text)


def _table(found: dict[str, list[Outcome]], seconds: float) -> Table:
    columns = (
        "server", "hits before", f"{WINDOW_S:g} s after", f"{seconds:g} s after",
        "after / before", "back after", "streams", "broken", "asked again", "no answer for",
        "first token before", "… after",
    )  # fmt: skip
    rows = []
    for kind, several in found.items():
        back = [each.back_s for each in several if each.back_s is not None]
        asked = sum(each.num_again for each in several)
        cut_off = sum(each.num_cut_off for each in several)
        rows.append([
            kind,
            _spread([each.before for each in several], "{:.3f}"),
            _spread([each.at_first for each in several], "{:.3f}"),
            _spread([each.after for each in several], "{:.3f}"),
            _spread([each.ratio for each in several], "{:.3f}"),
            _spread(back, "{:.0f} s") if len(back) == len(several) else "not in this time",
            str(sum(each.num_before + each.num_after for each in several)),
            str(sum(each.num_broken for each in several)),
            f"{asked}" + (f", {cut_off} cut off" if cut_off else ""),
            _spread([each.away_s for each in several], "{:.1f} s"),
            _spread([each.first_before_s for each in several], "{:.2f} s"),
            _spread([each.first_after_s for each in several], "{:.2f} s"),
        ])  # fmt: skip
    return Table(title="A server that is replaced", columns=columns, rows=rows)


def _spread(values: list[float], form: str) -> str:
    if len(values) == 1:
        return form.format(values[0])
    least, most = form.format(min(values)), form.format(max(values))
    return f"{form.format(statistics.median(values))} ({least} … {most})"


if __name__ == "__main__":
    typer.run(main)
