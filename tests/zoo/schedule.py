"""A mixed schedule through the engine: chunks between decodes, a fork, a hit, a preemption.

Whatever the engine samples is kept with the logits it was sampled from; what these should have
been is for others to say.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.engine.sequence import Sequence
from quire.engine.step_plan import StepPlan

# Small blocks and small steps: much happens within few tokens.
OPTIONS: dict[str, Any] = dict(
    kv_cache_memory_bytes="8MB",
    max_model_len=64,
    max_num_seqs=5,
    max_num_batched_tokens=13,
    block_size=4,
)
LENGTHS = (26, 3, 19, 27)
_SHARED = 24  # tokens of the first prompt that the last one begins with: its full blocks


class Recorded:
    """The logits of every token that an engine computed some for."""

    def __init__(self) -> None:
        self.rows: list[tuple[Sequence, int, Tensor]] = []  # of which sequence, at which token

    @contextmanager
    def listening(self, llm: LLM) -> Iterator[None]:
        runner: Any = llm.engine._runner
        run: Callable[[StepPlan], Tensor] = runner.run

        def listen(plan: StepPlan) -> Tensor:
            logits = run(plan)
            rows = iter(logits.clone())
            for chunk in plan.chunks:
                for at in range(chunk.logits_from, chunk.stop):
                    self.rows.append((chunk.sequence, at, next(rows)))
            return logits

        runner.run = listen
        try:
            yield
        finally:
            del runner.run


def prompts(vocab_size: int) -> list[list[int]]:
    """The last one begins as the first."""
    generator = torch.Generator().manual_seed(5)
    made: list[list[int]] = [
        torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS
    ]
    made[3] = made[0][:_SHARED] + made[3][_SHARED:]
    return made


def bytes_differ(llm: LLM, prompt: list[int]) -> str:
    """Where a sequence takes other bytes than an accounting without tensors, and its spec, say."""
    accounting, memory = llm._kv.accounting, llm._kv.memory
    planned, storage = llm._kv._make()
    storage.close()
    planned.add(0)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (sequence,) = llm.start(llm.request(prompt, params), lambda _: None, index=0)
    while llm.step() and sequence.finish_reason is None:
        planned.try_extend(0, accounting.num_tokens(sequence.seq_id))
        planned.drain()
        taken, said = accounting.usage(), planned.usage()
        if (taken.committed_bytes, taken.used_bytes) != (said.committed_bytes, said.used_bytes):
            return f"it takes {taken}, and was planned with {said}"
        if memory.committed_bytes != taken.committed_bytes:
            return f"{memory.committed_bytes} bytes are committed, {taken.committed_bytes} counted"
        if taken.used_bytes != llm.spec.bytes_for(taken.num_tokens):
            return f"{taken.used_bytes} bytes are in use, its spec says otherwise"
    return ""


def run(llm: LLM, several: list[list[int]]) -> tuple[list[tuple[Sequence, int, Tensor]], int]:
    """Rows (sequence, token, logits), and how many tokens were found in the prefix cache."""
    recorded = Recorded()
    drawn = [
        SamplingParams(
            n=2 if index == 2 else 1,
            max_tokens=9,
            temperature=1.0,
            seed=index,
            ignore_eos=True,
            prompt_logprobs=0 if index == 0 else None,  # so it has logits at every token
        )
        for index in range(len(several))
    ]
    sequences: list[Sequence] = []

    def start(index: int) -> None:
        request = llm.request(several[index], drawn[index])
        sequences.extend(llm.start(request, lambda _: None, index=index))

    with recorded.listening(llm):
        start(0)
        start(1)
        llm.step()
        llm.step()
        start(2)
        llm.step()
        llm.step()
        assert llm.engine.scheduler.preempt_youngest(spare_oldest=True), "none could make room"
        while llm.step():
            pass
        start(3)
        while llm.step():
            pass
    assert all(s.finish_reason == "length" for s in sequences), "a sequence ended early"
    return recorded.rows, sum(s.num_cached_tokens for s in sequences)
