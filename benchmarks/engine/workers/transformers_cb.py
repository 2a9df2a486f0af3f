"""Transformers' continuous batching, as a worker of the engine benchmark."""

from collections.abc import Generator

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.engine.worker import NUM_THREADS, POOL_TOKENS, Arrival, serve
from benchmarks.engine.workloads import Asked

PAGE_TOKENS = 32
BATCH_TOKENS = 512


class ContinuousBatching:
    def __init__(self, model: str) -> None:
        torch.set_num_threads(NUM_THREADS)
        transformers.logging.set_verbosity_error()
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="paged|sdpa"
        ).eval()
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=POOL_TOKENS // PAGE_TOKENS,
            max_batch_tokens=BATCH_TOKENS,
            allow_block_sharing=False,
            use_async_batching=False,
            max_memory_percent=0.5,  # a check of its own; the pool has the size above
        )
        pad = loaded.generation_config.pad_token_id
        self._manager = loaded.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=pad),
            continuous_batching_config=config,
        )
        self._manager.start()
        self.about = {
            "version": transformers.__version__,
            "precision": "bf16 / bf16 / bf16",
            "settings": f"continuous batching, paged|sdpa, pages of {PAGE_TOKENS} tokens, "
            f"{BATCH_TOKENS} tokens a step, prefix sharing off",
        }

    def run(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        indices = {
            self._manager.add_request(
                one.prompt, max_new_tokens=one.num_tokens, streaming=True
            ): index
            for index, one in enumerate(asked)
        }
        given = dict.fromkeys(indices, 0)
        running = set(indices)
        try:
            while running:
                result = self._manager.get_result(timeout=1)
                if result is None:
                    if not self._manager.is_running():
                        raise RuntimeError("its thread has ended")
                    continue
                name = result.request_id
                if result.error:
                    raise RuntimeError(result.error)
                for token_id in result.generated_tokens[given[name] :]:
                    given[name] += 1
                    yield indices[name], token_id
                if result.is_finished():
                    running.remove(name)
        finally:
            for name in running:
                self._manager.cancel_request(name)


if __name__ == "__main__":
    serve(ContinuousBatching)
