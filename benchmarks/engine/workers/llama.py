"""llama.cpp's server, as a worker of the engine benchmark, and a model as it reads one.

    python -m benchmarks.engine.workers.llama MODEL.gguf LLAMA-SERVER bf16|int8|int4
    python -m benchmarks.engine.workers.llama --convert LLAMA.CPP-SOURCE MODEL OUTPUT.gguf

The server takes its KV memory at the start, as many equal parts as sequences may run. So each kind
of workload has a server of the shape that suits it best, started before the time is taken.
"""

import json
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.engine.worker import NUM_SEQUENCES, NUM_THREADS, Answer, Arrival, arrivals_of, serve
from benchmarks.engine.workloads import MOST_TOKENS, Asked
from benchmarks.harness.server import free_port

SLOT_TOKENS = 1280  # of one sequence where many run
START_S = 60
# Weights / compute / KV. Activations become bytes where weights are codes.
_PRECISIONS = {
    "bf16": "bf16 / bf16 and f32 / f16",
    "int8": "Q8_0 / int8 and f32 / f16",
    "int4": "Q4_0 / int8 and f32 / f16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    num_slots: int
    slot_tokens: int


MANY = Shape(num_slots=NUM_SEQUENCES, slot_tokens=SLOT_TOKENS)
ONE = Shape(num_slots=1, slot_tokens=-(-MOST_TOKENS // 256) * 256)


class Llama:
    def __init__(self, model: str) -> None:
        self._model, self._program = model, sys.argv[2]
        self._shape: Shape | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._url = ""
        done = subprocess.run([self._program, "--version"], capture_output=True, text=True)
        self.about = {
            "version": " ".join(done.stderr.split()[:2]),
            "precision": _PRECISIONS[sys.argv[3]],
            "settings": f"llama-server, built for this processor, {NUM_SEQUENCES} slots of "
            f"{SLOT_TOKENS} tokens for mixed work and one for single streams, no prompt cache",
        }

    def run(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        self._ensure(MANY if len(asked) > 1 else ONE)
        return self._running(asked)

    def _running(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        arrivals: queue.SimpleQueue[Arrival | BaseException | None] = queue.SimpleQueue()
        left = threading.Event()
        threads = [
            threading.Thread(target=self._stream, args=(index, one, arrivals, left), daemon=True)
            for index, one in enumerate(asked)
        ]
        for thread in threads:
            thread.start()
        try:
            yield from arrivals_of(arrivals, len(threads))
        finally:
            left.set()

    def _stream(
        self,
        index: int,
        one: Asked,
        arrivals: "queue.SimpleQueue[Arrival | BaseException | None]",
        left: threading.Event,
    ) -> None:
        order: Answer = {
            "prompt": one.prompt,
            "n_predict": one.num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self._url}/completion",
            json.dumps(order).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                for line in reply:
                    if left.is_set():
                        return  # closing the connection ends the request
                    if line.startswith(b"data: ") and line[6:7] == b"{":
                        for token_id in json.loads(line[6:])["tokens"]:
                            arrivals.put((index, token_id))
        except (OSError, ValueError, KeyError) as error:
            arrivals.put(error)
        else:
            arrivals.put(None)

    def _ensure(self, shape: Shape) -> None:
        """A server of this shape, and no other."""
        if shape == self._shape:
            return
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._server = subprocess.Popen(
            [
                self._program, "-m", self._model, "--host", "127.0.0.1", "--port", str(port),
                "-t", str(NUM_THREADS), "-tb", str(NUM_THREADS), "--no-ui", "--cache-ram", "0",
                "-fa", "on", "--fit", "off", "-np", str(shape.num_slots),
                "-c", str(shape.num_slots * shape.slot_tokens),
            ],
            stdout=sys.stderr,
            stderr=sys.stderr,
        )  # fmt: skip
        end = time.monotonic() + START_S
        while self._server.poll() is None and time.monotonic() < end:
            with suppress(OSError), urllib.request.urlopen(f"{self._url}/health") as reply:
                if reply.status == 200:
                    self._shape = shape
                    return
            time.sleep(0.05)
        raise RuntimeError(f"llama-server did not start; it ended with {self._server.poll()}")


def convert(source: str, model: str, output: str) -> None:
    """A Transformers folder as a GGUF file, by llama.cpp's own converter.

    The converter refuses tokenizers that it has not seen, and would look for one of another kind
    first. Ours splits as Qwen's does, so it is told so.
    """
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import convert_hf_to_gguf
    from conversion.base import TextModel
    from conversion.qwen import Qwen2Model

    Qwen2Model.set_vocab = TextModel._set_vocab_gpt2
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", output, "--outtype", "bf16"]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        convert(*sys.argv[2:])
    else:
        serve(Llama)
