"""OpenVINO GenAI's continuous batching, as a worker of the engine benchmark.

The pool grows as it is needed (``cache_size`` 0). Its own default would keep keys and values in
eight bits: here they are of sixteen, as the other engines'. Where weights are of eight or four bits
it computes as it chooses itself.
"""

import sys
from collections.abc import Generator
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.engine.worker import NUM_SEQUENCES, NUM_THREADS, Arrival, serve
from benchmarks.engine.workloads import Asked

BATCH_TOKENS = 512


class OpenVino:
    def __init__(self, model: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 0
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.max_num_seqs = NUM_SEQUENCES
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True

        weights = sys.argv[2]
        # Where a processor lacks bfloat16 it computes in float32, and refuses such keys and values.
        known = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        computes, keeps = ("bf16", "bf16") if known else ("f32", "f16")
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": NUM_THREADS,
            "KV_CACHE_PRECISION": keeps,
        }
        if weights == "bf16":
            properties["INFERENCE_PRECISION_HINT"] = computes
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._next_id = 0
        self.about = {
            "version": genai.__version__,
            "precision": f"f16 file / {computes} / {keeps}"
            if weights == "bf16"
            else f"{weights} / its own choice / {keeps}",
            "settings": f"ContinuousBatchingPipeline, split-fuse, {BATCH_TOKENS} tokens a step, "
            "growing pool, prefix caching off",
        }

    def run(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        handles = [self._add(one) for one in asked]
        try:
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                for index, handle in enumerate(handles):
                    while handle.can_read():
                        for output in handle.read().values():
                            for token_id in output.generated_ids:
                                yield index, token_id
        finally:
            for handle in handles:
                handle.cancel()

    def _add(self, one: Asked) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = one.num_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._next_id += 1
        ids = ov.Tensor(np.array([one.prompt], dtype=np.int64))
        return self._pipeline.add_request(self._next_id, ids, config)


if __name__ == "__main__":
    serve(OpenVino)
