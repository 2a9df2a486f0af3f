"""Blocks from server to server: MB a second, and the first token of a prompt that a peer computed.

    python -m benchmarks.tiers.bench_transfer --rounds 3

*Rates*: a process with leased records gives 125 of them to this one, sixteen to a question, as for
a prompt of 2,000 tokens; beside it a bare socket and a bare file of memory between the same two
processes, with the same questions, which know all lengths and check nothing.

*First tokens*: engines of the 0.45 B model in two processes, a pair for each way. One computes a
prompt and leaves it, the first time and from its cache later; the other one, with an empty cache,
gets it with what the answer said, at once: copying out, and sealing, are part of the time. Beside
it the same engine computes it, and finds it in its own cache. Without processors that compute bf16
a prompt of 2,000 tokens takes half a minute on two quiet cores, and minutes on busy ones.

*Draining*: ``quire serve`` with that model has computed a prompt and gets SIGTERM; its blocks go to
another server, which is then asked for the same prompt.

Kinds take turns within a round. What is done is told on stderr, with the seconds since the start.
"""

import json
import os
import random
import re
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, TypeAlias

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import httpx
import torch
import typer

from benchmarks.engine.model import make
from benchmarks.harness.server import free_port, server
from quire import LLM, SamplingParams
from quire.models.loader import LoadedModel, load
from quire.tiers import Deadline
from quire.tiers.transfer.leased_records import LeasedRecords
from quire.tiers.transfer.peer_address import PeerAddress
from quire.tiers.transfer.peer_frames import RECORDS_AT_ONCE, Hello
from quire.tiers.transfer.peer_server import PeerServer
from quire.tiers.transfer.peer_tier import PeerTier

SEED = 1234
MODEL = Path(tempfile.gettempdir()) / "quire-bench-model"
RECORD_BYTES = 1_835_968  # of the model: 16 tokens of 112 KiB, and a header
LEASES = {"size": 2**31, "lease_s": 60}  # of some prompts at once
ENDS_S = 600.0  # after which a process that hangs is given up
WARM_TOKENS = 100
BEGUN_S = time.perf_counter()
ONE = SamplingParams(max_tokens=1, temperature=0)

Rates: TypeAlias = dict[str, list[float]]
Ways: TypeAlias = dict[str, tuple[str, dict[str, Any]]]  # by name: an address, options


def main(
    rounds: Annotated[int, typer.Option(help="Of first tokens.")] = 3,
    rate_rounds: Annotated[int, typer.Option(help="Of rates.")] = 15,
    drains: Annotated[int, typer.Option(help="Rounds of draining.")] = 0,
    prompt_tokens: int = 2000,
    threads: Annotated[int, typer.Option(help="Threads of torch, in each process.")] = 2,
    wait_s: Annotated[float, typer.Option(help="As in kv_connector_extra_config.")] = 0.0,
    within: Annotated[float, typer.Option(help="Seconds after which no round begins.")] = 3600.0,
    model: Annotated[Path, typer.Option(help="Its folder; made if it is not there.")] = MODEL,
) -> None:
    """Print rates, first tokens, draining: medians, the least and the greatest, ratios of pairs."""
    stop_s = time.monotonic() + within
    with tempfile.TemporaryDirectory() as folder:
        if rate_rounds:
            _rates(Path(folder), rate_rounds, -(-prompt_tokens // 16))
        if rounds:
            own = make(model)
            _first_tokens(Path(folder), own, rounds, prompt_tokens, threads, wait_s, stop_s)
        if drains:
            _drains(Path(folder), make(model), drains, prompt_tokens)


# -- rates -----------------------------------------------------------------------------------------


def _rates(folder: Path, rounds: int, count: int) -> None:
    key = secrets.token_bytes(32)
    addresses = {"unix": f"unix:{folder}/records", "tcp": "tcp://127.0.0.1:0"}
    with _child(_give, addresses, key, str(folder / "bare"), count) as pipe:
        ports: dict[str, int] = pipe.recv()
        hello = _hello()
        names = _names(count)
        into = [memoryview(bytearray(RECORD_BYTES)) for _ in range(count)]
        with ExitStack() as end:
            tiers = {
                "a Unix socket": PeerTier(PeerAddress.parse(addresses["unix"]), hello, None),
                "TCP": PeerTier(PeerAddress("", "127.0.0.1", ports["tcp"]), hello, key),
            }
            for tier in tiers.values():
                end.callback(tier.close)
            bare_tcp = socket.create_connection(("127.0.0.1", ports["bare"]))
            bare_unix = socket.socket(socket.AF_UNIX)
            bare_unix.connect(str(folder / "bare"))
            end.callback(bare_tcp.close)
            end.callback(bare_unix.close)

            def loads(tier: PeerTier) -> Callable[[], None]:
                def work() -> None:
                    assert tier.load(names, into, Deadline.after(60.0)) == count

                return work

            kinds: dict[str, Callable[[], None]] = {}
            for name, tier in tiers.items():
                kinds[name] = kinds[f"{name}, again"] = loads(tier)
            kinds["TCP, bare"] = kinds["TCP, bare again"] = lambda: _read_tcp(bare_tcp, into)
            kinds["a file of memory, bare"] = lambda: _read_files(bare_unix, into)
            kinds["a file of memory, bare again"] = kinds["a file of memory, bare"]
            rates = _in_turns(kinds, rounds, count * RECORD_BYTES)
    print(f"{count} records of {RECORD_BYTES:,} bytes, {rounds} rounds")
    for name, own in rates.items():
        print(f"{name:30} {_spread(own, ' MB/s', 0)}")
    for name, other in (
        ("a Unix socket", "a file of memory, bare"),
        ("TCP", "TCP, bare"),
        ("a Unix socket", "a Unix socket, again"),
        ("TCP", "TCP, again"),
        ("TCP, bare", "TCP, bare again"),
        ("a file of memory, bare", "a file of memory, bare again"),
    ):
        pairs = [a / b for a, b in zip(rates[name], rates[other], strict=True)]
        print(f"{name} / {other}: {_spread(pairs)}")


def _in_turns(kinds: dict[str, Callable[[], None]], rounds: int, num_bytes: int) -> Rates:
    names, rates = list(kinds), Rates()
    for number in range(-1, rounds):  # the first one warms up
        at = number % len(names)
        for name in names[at:] + names[:at]:
            begun_s = time.perf_counter()
            kinds[name]()
            if number >= 0:
                rates.setdefault(name, []).append(num_bytes / (time.perf_counter() - begun_s) / 1e6)
    return {name: rates[name] for name in names}


def _read_tcp(stream: socket.socket, into: list[memoryview]) -> None:
    for start in range(0, len(into), RECORDS_AT_ONCE):
        several = into[start : start + RECORDS_AT_ONCE]
        stream.sendall(bytes([len(several)]))
        for view in several:
            done = 0
            while done < len(view):
                done += stream.recv_into(view[done:])


def _read_files(stream: socket.socket, into: list[memoryview]) -> None:
    for start in range(0, len(into), RECORDS_AT_ONCE):
        several = into[start : start + RECORDS_AT_ONCE]
        stream.sendall(bytes([len(several)]))
        _, (file,), _, _ = socket.recv_fds(stream, 1, 1)
        os.preadv(file, several, 0)
        os.close(file)


def _give(pipe: Connection, addresses: dict[str, str], key: bytes, path: str, count: int) -> None:
    """Be the other process: leased records, and the same bytes bare."""
    servers, hello = [], _hello()
    for name, address in addresses.items():
        records = LeasedRecords(2**31, ENDS_S)
        lease, _ = records.lease([[RECORD_BYTES]] * count)
        for each in _names(count):
            records.keep(lease, each, memoryview(os.urandom(RECORD_BYTES)))
        own = PeerServer(
            PeerAddress.parse(address), records, hello, None if name == "unix" else key
        )
        own.start()
        servers.append(own)
    bare = [memoryview(os.urandom(RECORD_BYTES)) for _ in range(count)]
    over_tcp, over_unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    over_unix.bind(path)
    over_unix.listen()
    for listener in (over_tcp, over_unix):
        threading.Thread(target=_give_bare, args=(listener, bare), daemon=True).start()
    pipe.send({"tcp": servers[1].address.port, "bare": over_tcp.getsockname()[1]})
    pipe.recv()
    for own in servers:
        own.close()


def _give_bare(listener: socket.socket, records: list[memoryview]) -> None:
    stream, _ = listener.accept()
    at = 0
    while count := stream.recv(1):
        several = records[at : at + count[0]]
        at = (at + count[0]) % len(records)
        if stream.family == socket.AF_INET:
            for view in several:
                stream.sendall(view)
            continue
        file = os.memfd_create("bare")
        for view in several:
            os.write(file, view)
        socket.send_fds(stream, [b"f"], [file])
        os.close(file)


def _hello() -> Hello:
    return Hello(fingerprint=bytes(32), sizes=(RECORD_BYTES,), is_sealed=False, nonce=bytes(32))


def _names(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


# -- first tokens ----------------------------------------------------------------------------------


def _first_tokens(
    folder: Path,
    model: Path,
    rounds: int,
    prompt_tokens: int,
    threads: int,
    wait_s: float,
    stop_s: float,
) -> None:
    torch.set_num_threads(threads)
    loaded, rng = load(model), random.Random(SEED)
    (folder / "key").write_bytes(secrets.token_bytes(32))
    waits = {"wait_s": wait_s}
    ways: Ways = {
        "a Unix socket": (f"unix:{folder}/peer", {}),
        "TCP, trusted": (f"tcp://127.0.0.1:{free_port()}", {"kv_tier_trusted": True}),
        "TCP, sealed": (
            f"tcp://127.0.0.1:{free_port()}",
            {"kv_tier_key": str(folder / "key")},
        ),
    }
    times, cached = Rates(), dict[str, list[int]]()
    loading, whole = Rates(), Rates()
    with _child(_prefill, str(model), ways, threads) as pipe, ExitStack() as end:
        _answer(pipe)
        _tell("the first process has its engines")
        engines = {
            way: end.enter_context(
                closing(_engine(loaded, "kv_consumer", {"peers": [address], **waits}, options))
            )
            for way, (address, options) in ways.items()
        }
        _tell("the second process has its engines")
        prompt = [rng.randrange(5, loaded.vocab_size) for _ in range(prompt_tokens)]
        for way in ways:  # its cache has the prompt from then on: computing takes most of the time
            begun_s = time.perf_counter()
            _left(pipe, way, prompt)
            _tell(f"the prompt is computed and left, {way}: {time.perf_counter() - begun_s:.2f} s")
        for number in range(rounds):
            if number and time.monotonic() > stop_s:
                rounds = number
                break
            names = [f"{way}{again}" for way in ways for again in ("", ", again")]
            names += ["computed", "computed, again"]
            at = number % len(names)
            for name in names[at:] + names[:at]:
                way = name.removesuffix(", again")
                engine = engines.get(way, engines["a Unix socket"])
                engine.reset_prefix_cache()
                params = _left(pipe, way, prompt) if way in ways else None
                before = _loaded_by(engine)
                seconds, found = _first_token(engine, prompt, params)
                times.setdefault(name, []).append(seconds)
                cached.setdefault(name, []).append(found)
                _tell(f"round {number + 1}: {name}: {seconds:.2f} s, {found:,} tokens cached")
                num_bytes, load_s, whole_s = (
                    new - old for new, old in zip(_loaded_by(engine), before, strict=True)
                )
                if way in ways and num_bytes:
                    loading.setdefault(name, []).append(num_bytes / load_s / 1e6)
                    whole.setdefault(name, []).append(num_bytes / whole_s / 1e6)
                if name == "a Unix socket":
                    for own in ("its own cache", "its own cache, again"):
                        seconds, found = _first_token(engine, prompt, None)
                        _tell(f"round {number + 1}: {own}: {seconds:.2f} s, {found:,} tokens")
                        times.setdefault(own, []).append(seconds)
                        cached.setdefault(own, []).append(found)
    print(f"{prompt_tokens:,} tokens, {rounds} rounds, {threads} threads of torch in each process")
    for name in sorted(times, key=lambda name: statistics.median(times[name])):
        ratios = [a / b for a, b in zip(times[name], times["computed"], strict=True)]
        told = ""
        if name in loading:
            told = (
                f", {_spread(loading[name], ' MB/s', 0)} while loading, "
                f"{_spread(whole[name], ' MB/s', 0)} from question to last check"
            )
        print(
            f"{name:23} first token {_spread(times[name], ' s')}, × computed {_spread(ratios)}, "
            f"cached tokens {min(cached[name])} … {max(cached[name])}{told}"
        )


def _engine(loaded: LoadedModel, role: str, extra: dict[str, Any], options: dict[str, Any]) -> LLM:
    config = {
        "kv_connector": "QuireConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    llm = LLM(
        loaded,
        kv_cache_memory_bytes=2**29,
        max_model_len=4096,
        max_num_seqs=4,
        kv_transfer_config=config,
        **options,
    )
    warm = SamplingParams(max_tokens=2, temperature=0)
    llm.generate([[7] * WARM_TOKENS], warm)  # so that it knows what computing costs
    return llm


def _prefill(pipe: Connection, model: str, ways: Ways, threads: int) -> None:
    """Be the other process: an engine for each way, which leaves prompts."""
    torch.set_num_threads(threads)
    loaded = load(model)
    with ExitStack() as end:
        engines = {
            way: end.enter_context(
                closing(_engine(loaded, "kv_producer", {"listen": address, **LEASES}, options))
            )
            for way, (address, options) in ways.items()
        }
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            way, prompt = asked
            [found] = engines[way].generate(
                [prompt], ONE, kv_transfer_params={"do_remote_decode": True}
            )
            pipe.send(dict(found.kv_transfer_params or {}))


def _left(pipe: Connection, way: str, prompt: list[int]) -> dict[str, Any]:
    pipe.send((way, prompt))
    params: dict[str, Any] = _answer(pipe)
    assert params["remote_num_tokens"] >= len(prompt) - 16
    return params


def _first_token(llm: LLM, prompt: list[int], params: dict[str, Any] | None) -> tuple[float, int]:
    """Returns: seconds to a prompt's first token, cached tokens."""
    begun_s = time.perf_counter()
    [found] = llm.generate([prompt], ONE, kv_transfer_params=params)
    return time.perf_counter() - begun_s, found.num_cached_tokens


def _loaded_by(llm: LLM) -> tuple[float, float, float]:
    """Return the bytes that a peer has given, and the seconds of its answers, and of whole jobs.

    A job is from the question for a prompt to the last record that was opened and checked.
    """
    assert llm.tiers is not None
    [peer] = llm.tiers.tiers
    return peer.loaded_bytes, peer.load_s, peer.promotion_s.sum


# -- draining --------------------------------------------------------------------------------------


def _drains(folder: Path, model: Path, rounds: int, prompt_tokens: int) -> None:
    rng, found = random.Random(SEED), dict[str, list[float]]()
    where = f"unix:{folder}/heir"
    flags = [str(model), "--served-model-name", "drained", "--max-model-len", "4096"]
    flags += ["--kv-cache-memory-bytes", "512MiB", "--shutdown-timeout", "60"]
    heirs = _transfer("kv_producer", {"listen": where, **LEASES})
    with server(*flags, *heirs, log=folder / "heir.log") as heir:
        _tell("the heir is up")
        for number in range(rounds):
            log = folder / f"old-{number}.log"
            body = {
                "model": "drained",
                "prompt": [rng.randrange(5, 4000) for _ in range(prompt_tokens)],
                "max_tokens": 1,
                "temperature": 0,
            }
            olds = _transfer("kv_consumer", {"peers": [where], "drain_to": where})
            with server(*flags, *olds, log=log) as old:
                computed_s, _ = _asked(old.port, body)
                _tell(f"round {number + 1}: computed in {computed_s:.2f} s")
                begun_s = time.perf_counter()  # then one SIGTERM: a second one stops at once
            ended_s = time.perf_counter() - begun_s
            said = re.search(r"(\d+) cached blocks are stored .* in ([\d.]+) s", log.read_text())
            if said is None:
                raise RuntimeError(f"the server has stored nothing:\n{log.read_text()}")
            again_s, cached = _asked(heir.port, body)
            _tell(f"round {number + 1}: {said[0]}; {cached:,} tokens cached at the heir")
            for name, value in (
                ("blocks", float(said[1])),
                ("seconds to store them", float(said[2])),
                ("seconds from SIGTERM to the end", ended_s),
                ("seconds of the request, computed", computed_s),
                ("seconds of the request, at the heir", again_s),
                ("cached tokens at the heir", float(cached)),
            ):
                found.setdefault(name, []).append(value)
    print(f"draining by SIGTERM, {prompt_tokens:,} tokens, {rounds} rounds")
    for name, values in found.items():
        print(f"{name:36} {_spread(values, digits=2)}")


def _asked(port: int, body: dict[str, Any]) -> tuple[float, int]:
    """Returns: seconds of a request, cached tokens."""
    begun_s = time.perf_counter()
    url = f"http://127.0.0.1:{port}/v1/completions"
    answer = httpx.post(url, json=body, timeout=ENDS_S).raise_for_status().json()
    took_s = time.perf_counter() - begun_s
    return took_s, (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _transfer(role: str, extra: dict[str, Any]) -> list[str]:
    config = {
        "kv_connector": "QuireConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(config)]


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def _child(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in another process, with one end of a pipe; None through it ends it."""
    context = get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=work, args=(far, *arguments), daemon=True)
    process.start()
    far.close()
    try:
        yield near
        near.send(None)
        process.join(ENDS_S)
    finally:
        if process.is_alive():
            process.kill()


def _answer(pipe: Connection) -> Any:
    """Return what the other process says. Raises: TimeoutError, EOFError where it has ended."""
    if not pipe.poll(ENDS_S):
        raise TimeoutError(f"the other process has said nothing for {ENDS_S:g} s")
    return pipe.recv()


def _tell(what: str) -> None:
    print(f"{time.perf_counter() - BEGUN_S:6.1f} s: {what}", file=sys.stderr, flush=True)


def _spread(values: list[float], unit: str = "", digits: int = 3) -> str:
    middle = statistics.median(values)
    least, most = min(values), max(values)
    return f"{middle:,.{digits}f}{unit} ({least:,.{digits}f} … {most:,.{digits}f})"


if __name__ == "__main__":
    typer.run(main)
