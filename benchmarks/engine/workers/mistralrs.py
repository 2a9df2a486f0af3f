"""mistral.rs, as a worker of the engine benchmark.

Its interface for Python takes text, so prompts are token ids written as text, and their lengths
differ by a few tokens. Requests that stream are submitted first and read by a thread each: the
runner may be entered by one thread at a time.
"""

import queue
import threading
from collections.abc import Generator, Iterator
from importlib.metadata import version
from typing import Any

import mistralrs

from benchmarks.engine.worker import NUM_SEQUENCES, Arrival, arrivals_of, serve
from benchmarks.engine.workloads import Asked


class Mistral:
    def __init__(self, model: str) -> None:
        self._runner = mistralrs.Runner(
            mistralrs.Which.Plain(
                model_id=model,
                arch=mistralrs.Architecture.Qwen3,
                dtype=mistralrs.ModelDType.BF16,
            ),
            max_seqs=NUM_SEQUENCES,
            prefix_cache_n=0,
        )
        self.about = {
            "version": version("mistralrs"),
            "precision": "bf16 / bf16 / bf16",
            "settings": "Runner, prefix caching off; prompts as text, so a few tokens longer",
        }

    def run(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        prompts = [self._runner.detokenize_text(one.prompt, False) for one in asked]
        return self._running(asked, prompts)

    def _running(self, asked: list[Asked], prompts: list[str]) -> Generator[Arrival, None, None]:
        arrivals: queue.SimpleQueue[Arrival | BaseException | None] = queue.SimpleQueue()
        streams = [
            self._runner.send_chat_completion_request(
                mistralrs.ChatCompletionRequest(
                    messages=prompt,
                    model="default",
                    max_tokens=one.num_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    stream=True,
                )
            )
            for one, prompt in zip(asked, prompts, strict=True)
        ]
        for index, stream in enumerate(streams):
            threading.Thread(target=_drain, args=(index, stream, arrivals), daemon=True).start()
        yield from arrivals_of(arrivals, len(streams))


def _drain(index: int, stream: Iterator[Any], arrivals: "queue.SimpleQueue[Any]") -> None:
    """A piece of text is a token, except that parts of one character come together."""
    given = 0
    try:
        for piece in stream:
            usage = getattr(piece, "usage", None)
            total = usage.completion_tokens if usage else given + 1
            for _ in range(given, total):
                arrivals.put((index, None))
            given = max(given, total)
    except Exception as error:
        arrivals.put(error)
    else:
        arrivals.put(None)


if __name__ == "__main__":
    serve(Mistral)
