"""Quire, through its public interface, as a worker of the engine benchmark."""

import sys
from collections.abc import Generator

import torch

from benchmarks.engine.worker import NUM_SEQUENCES, NUM_THREADS, POOL_TOKENS, Arrival, serve
from benchmarks.engine.workloads import MOST_TOKENS, TOKEN_BYTES, Asked
from quire import LLM, SamplingParams, __version__

BATCH_TOKENS = 2048


class Quire:
    def __init__(self, model: str) -> None:
        torch.set_num_threads(NUM_THREADS)
        weights = sys.argv[2]
        self.llm = LLM(
            model,
            quantization=None if weights == "bf16" else weights,
            max_num_seqs=NUM_SEQUENCES,
            max_num_batched_tokens=BATCH_TOKENS,
            kv_cache_memory_bytes=POOL_TOKENS * TOKEN_BYTES,
            max_model_len=MOST_TOKENS + 1,
            enable_prefix_caching=False,  # as the peers
        )
        self.about = {
            "version": __version__,
            "precision": f"{weights} / bf16 / bf16",
            "settings": f"paged, prefix caching off, {BATCH_TOKENS} tokens a step, attention by "
            f"{self.llm.attention_backend}",
        }

    def run(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        params = [
            SamplingParams(max_tokens=one.num_tokens, temperature=0, ignore_eos=True)
            for one in asked
        ]
        for delta in self.llm.stream([one.prompt for one in asked], params):
            if delta.token_id is not None:
                yield delta.index, delta.token_id


if __name__ == "__main__":
    serve(Quire)
