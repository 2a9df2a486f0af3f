"""Prefill chunks and decodes, packed into one forward pass, give what the model gives alone."""

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.covering import in_turn
from quire.attention import SdpaAttention
from quire.engine.kv_cache import KVCache
from quire.engine.runner import ModelRunner
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Sampled
from quire.kv import STRATEGIES, Accounting, CacheConfig, Storage, build_accounting, build_storage
from quire.memory import HostMemory
from quire.models.loader import adopt
from quire.sampling_params import SamplingParams
from tiny import CONFIGS, VOCAB, tiny_model, tokens

LENGTHS = (40, 9, 61, 23, 33)  # all tokens of a sequence, prompt and what is to follow it
PROMPTS = (24, 2, 47, 23 - 12, 1)
ARRIVALS = (0, 0, 3, 7, 12)  # the step before which each comes
BUDGET = 13  # tokens a step: prompts come in chunks, between others' decodes
TOLERANCE = 1e-5  # of the largest logit, fp32
SHARED = "virtual-shared"


@cache
def model_of(name: str) -> PreTrainedModel:
    torch.set_num_threads(1)
    model = tiny_model(name)
    # Before 5.19 Transformers' SDPA path leaves Gemma 2's softcap out; its eager one never did.
    model.set_attn_implementation("eager")
    return model


def texts() -> list[list[int]]:
    return [tokens(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]


@cache
def logits_alone(name: str) -> list[Tensor]:
    """The model's own, [L, vocabulary] each: no cache, one sequence at a time."""
    with torch.inference_mode():
        model = model_of(name)
        return [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts()]


def run_schedule(name: str, strategy: str) -> tuple[list[tuple[int, int, Tensor]], int]:
    """(sequence, position, logits) of each sampled row, and the number of mixed steps.

    The continuations are given, so that what is computed does not depend on what is sampled.
    """
    loaded = adopt(model_of(name))
    memory = HostMemory()
    config = CacheConfig(
        max_model_len=64,
        max_num_seqs=len(LENGTHS),
        capacity_bytes=2**26,
        block_size=4,
        growth_tokens=8,
        page_bytes=memory.page_bytes,
        shares_pages=strategy == SHARED,
    )
    strategy = "virtual" if strategy == SHARED else strategy

    def make_pair() -> tuple[Accounting, Storage]:
        accounting = build_accounting(strategy, loaded.spec, config)
        return accounting, build_storage(strategy, accounting, memory)

    kv = KVCache(make_pair)
    runner = ModelRunner(loaded, kv, SdpaAttention())
    runner.go("table")
    scheduler = Scheduler(
        kv.accounting,
        SchedulerLimits(max_model_len=64, max_num_seqs=len(LENGTHS), max_num_batched_tokens=BUDGET),
    )
    sequences: list[Sequence] = []
    rows: list[tuple[int, int, Tensor]] = []
    step = num_mixed = 0
    while len(sequences) < len(LENGTHS) or scheduler.has_unfinished:
        while len(sequences) < len(LENGTHS) and ARRIVALS[len(sequences)] <= step:
            index = len(sequences)
            params = SamplingParams(max_tokens=LENGTHS[index] - PROMPTS[index], ignore_eos=True)
            prompt = tuple(texts()[index][: PROMPTS[index]])
            request = Request(request_id=index, prompt_token_ids=prompt, params=params)
            sequences += scheduler.add(request)
        plan = scheduler.plan()
        kv.carry_out()
        logits = runner.run(plan)
        sampling = [draw.sequence for draw in plan.draws]
        assert logits.shape == (len(sampling), VOCAB)
        lengths = [chunk.stop - chunk.start for chunk in plan.chunks]
        num_mixed += 1 in lengths and max(lengths) > 1
        for sequence, row in zip(sampling, logits, strict=True):
            rows.append((sequence.seq_id, sequence.num_tokens - 1, row))
        given = [texts()[s.seq_id][s.num_tokens] for s in sampling]
        scheduler.update(plan, [Sampled(token_ids=(token,)) for token in given])
        scheduler.check()
        step += 1
    kv.close()
    return rows, num_mixed


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "strategy"), in_turn(CONFIGS, [*STRATEGIES, SHARED]))
def test_logits_equal_the_model_alone(name: str, strategy: str) -> None:
    rows, num_mixed = run_schedule(name, strategy)
    assert num_mixed >= 5
    assert len(rows) == sum(LENGTHS) - sum(PROMPTS)
    for index, position, row in rows:
        alone = logits_alone(name)[index]
        error = (row - alone[position]).abs().max() / alone.abs().max()
        assert error <= TOLERANCE, (index, position)
