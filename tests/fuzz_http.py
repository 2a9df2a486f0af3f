"""Ask a server at random for as long as asked: one that this starts, or another.

    python tests/fuzz_http.py --minutes 10 [--seed N] [--base-url http://127.0.0.1:8000]

Progress is a line a round. The first wrong answer is raised with its request, and the seed that it
came from. In the end there is a table: how often each path gave which status.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from server.process import running
from server.random_requests import FLAGS, Asker


@contextlib.contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with running(*FLAGS) as process:
        yield process.url
        if "Traceback" in process.log:
            sys.exit(f"the server has logged an error:\n{process.log}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base-url", help="of a server that runs")
    options = parser.parse_args()
    with _server(options.base_url) as url:
        asker = Asker(url)
        try:
            asker.ask_for(options.minutes, options.seed, lambda line: print(line, flush=True))
        finally:
            print(asker.tally)


if __name__ == "__main__":
    main()
