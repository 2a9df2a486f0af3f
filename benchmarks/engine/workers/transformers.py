"""Transformers' ``generate`` with a DynamicCache, as a worker of the engine benchmark.

Requests of several lengths are padded to a rectangle, and all run to the longest output: that is
how it batches. Only tokens that were asked for count.
"""

import queue
import threading
from collections.abc import Generator, Iterator

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.engine.worker import NUM_THREADS, Arrival, serve
from benchmarks.engine.workloads import Asked


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Tells of each step's tokens, and ends the generation when it is left."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[Tensor | BaseException | None] = queue.SimpleQueue()
        self.left = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        self.steps.put(input_ids[:, -1].clone())
        return torch.full((len(input_ids),), self.left, dtype=torch.bool)


class Generate:
    def __init__(self, model: str) -> None:
        torch.set_num_threads(NUM_THREADS)
        transformers.logging.set_verbosity_error()
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._pad = self._model.generation_config.pad_token_id
        self._model.generation_config.eos_token_id = None
        self.about = {
            "version": transformers.__version__,
            "precision": "bf16 / bf16 / bf16",
            "settings": "generate, DynamicCache, sdpa; several requests as a padded batch",
        }

    def run(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        watch = Watch()
        thread = threading.Thread(target=self._generate, args=(asked, watch))
        thread.start()
        try:
            yield from _arrivals(asked, watch)
        finally:
            watch.left = True
            thread.join()

    def _generate(self, asked: list[Asked], watch: Watch) -> None:
        longest = max(len(one.prompt) for one in asked)
        ids = torch.full((len(asked), longest), self._pad)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(asked):
            ids[row, longest - len(one.prompt) :] = torch.tensor(one.prompt)
            mask[row, longest - len(one.prompt) :] = 1
        try:
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(one.num_tokens for one in asked),
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([watch]),
            )
        except Exception as error:
            watch.steps.put(error)
        else:
            watch.steps.put(None)


def _arrivals(asked: list[Asked], watch: Watch) -> Iterator[Arrival]:
    num_steps = 0
    while (step := watch.steps.get()) is not None:
        if isinstance(step, BaseException):
            raise step
        for index, token_id in enumerate(step.tolist()):
            if num_steps < asked[index].num_tokens:
                yield index, token_id
        num_steps += 1


if __name__ == "__main__":
    serve(Generate)
