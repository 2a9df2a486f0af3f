"""Ask a server at random for as long as asked: one that this starts, or another.

    python tests/fuzz_http.py --minutes 10 [--seed N] [--base-url http://127.0.0.1:8000]

Progress is a line a round. The first wrong answer is raised with its request, and the seed that it
came from. In the end there is a table: how often each path gave which status.

    python tests/fuzz_http.py --bytes 5000 [--seed N]

sends so many heads and bodies without a key, after those that are known to have been slow, and
prints how long the event loop was held by the slowest. What takes more than a millisecond is sent
again: what it costs is the least of its times, for the interpreter also has work of its own.
"""

import argparse
import contextlib
import gc
import logging
import random
import sys
from collections.abc import Iterator

from server.process import running
from server.random_bytes import KNOWN, hostile, watched
from server.random_requests import FLAGS, Asker

_NUM_SLOWEST = 5
_BOUND_S = 0.001
_NUM_AGAIN = 5
_MOST_SHOWN = 120  # bytes of each


@contextlib.contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with running(*FLAGS) as process:
        yield process.url
        if " ERROR " in process.log:
            sys.exit(f"the server has logged an error:\n{process.log}")


def send_bytes(num_cases: int, seed: int) -> None:
    rng = random.Random(seed)
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # a line for each otherwise
    slowest: list[tuple[float, int, bool, bytes]] = []
    once: list[float] = []  # over the bound, and not when sent again
    with watched() as server:
        server.hold_s(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")  # what is made once
        gc.collect()
        gc.freeze()  # as the server does
        for number in range(num_cases + len(KNOWN)):
            data = KNOWN[number] if number < len(KNOWN) else hostile(rng)
            pieces = rng.choice((1, 1, 2, 7))
            for draining in (False, True):
                held_s = first_s = server.hold_s(data, pieces=pieces, draining=draining)
                for _ in range(_NUM_AGAIN):
                    if held_s <= _BOUND_S:
                        break
                    held_s = min(held_s, server.hold_s(data, pieces=pieces, draining=draining))
                if held_s <= _BOUND_S < first_s:
                    once.append(first_s)
                slowest.append((held_s, pieces, draining, data))
            slowest = sorted(slowest, reverse=True)[:_NUM_SLOWEST]
            if (number + 1) % 500 == 0:
                print(f"{number + 1:,} cases: {1000 * slowest[0][0]:.2f} ms", flush=True)
    for held_s, pieces, draining, data in slowest:
        shown = (
            f"{data[:_MOST_SHOWN]!r} … {data[-20:]!r}" if len(data) > _MOST_SHOWN else repr(data)
        )
        state = ", draining" if draining else ""
        print(f"{1000 * held_s:.2f} ms: {len(data):,} bytes, {pieces} pieces{state}: {shown}")
    again = f"; the longest {1000 * max(once):.2f} ms" if once else ""
    print(f"{len(once)} took more than {1000 * _BOUND_S:.0f} ms once, and not again{again}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base-url", help="of a server that runs")
    parser.add_argument("--bytes", type=int, help="cases without a key, instead of requests")
    options = parser.parse_args()
    if options.bytes is not None:
        send_bytes(options.bytes, options.seed)
        return
    with _server(options.base_url) as url:
        asker = Asker(url)
        try:
            asker.ask_for(options.minutes, options.seed, lambda line: print(line, flush=True))
        finally:
            print(asker.tally)


if __name__ == "__main__":
    main()
