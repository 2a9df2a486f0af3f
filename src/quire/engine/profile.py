"""The bytes that a step takes at its peak, which a device measures before the cache is sized.

The measured step is the largest that the options allow: ``max_num_batched_tokens`` tokens of as
many sequences as may run, with their drafts, and a sampled token for each. Its cache is just large
enough for it. ``StepBytes`` estimates smaller steps.

Source: vLLM's profile run.
"""

import logging
from bisect import bisect_right
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice

import torch

from quire.config import EngineConfig
from quire.engine.assembly import Assembly, assemble
from quire.engine.kv_sizing import cache_sizes, stored_spec
from quire.engine.sampling import DEAREST
from quire.engine.sampling.sampler import LogitsSampler
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Chunk, StepPlan
from quire.errors import MemoryUnavailable
from quire.kv import CacheConfig, Fits
from quire.kv.layout import whole_bytes
from quire.memory import MemoryProvider
from quire.memory.budget import Footprint
from quire.memory.machine import CudaPeak
from quire.models.loader import LoadedModel
from quire.models.vision import Vision
from quire.spec import ModelSpec
from quire.units import format_bytes, format_count

log = logging.getLogger(__name__)


class StepBytes:
    """Estimates a smaller step: the ledger's figure in proportion, corrected by measurements.

    ``kv_bytes_per_token`` are those of the cache, in blocks of ``block_size``. ``logits_each`` is 1
    and the drafts of a sequence. ``least_tokens`` are computed in any step: an encoder's source.
    """

    def __init__(
        self,
        whole_bytes: int,
        own: Footprint,
        *,
        max_tokens: int,
        max_num_seqs: int,
        logits_each: int = 1,
        kv_bytes_per_token: int,
        block_size: int,
        least_tokens: int = 0,
    ) -> None:
        self.whole_bytes = whole_bytes  # of ``max_tokens``
        encoder_bytes = own.encoder.peak_bytes if own.encoder else 0
        self.most_bytes = max(whole_bytes, encoder_bytes)  # an image is encoded before a step
        self.max_tokens = max_tokens
        self._own, self._max_num_seqs, self._least_tokens = own, max_num_seqs, least_tokens
        self._logits_each = logits_each
        self._kv_bytes, self._block_size = kv_bytes_per_token, block_size
        self._excess_bytes = 0  # of measured steps, beyond the estimate

    def of(self, num_tokens: int, num_logits: int) -> int:
        """Return the bytes at the peak of a step, without weights, with its tokens' KV memory.

        ``num_logits``: the most tokens whose logits are wanted, drafts apart.
        """
        kv = (num_tokens + self._block_size) * self._kv_bytes
        return self._estimate(num_tokens, num_logits) + self._excess_bytes + kv

    def most_tokens(self, num_bytes: int, num_logits: int) -> int:
        """Return the tokens of the largest step for which these bytes suffice, or 0."""
        sizes = range(1, self.max_tokens + 1)
        return bisect_right(sizes, num_bytes, key=lambda n: self.of(n, num_logits))

    def note(self, num_tokens: int, num_logits: int, peak_bytes: int) -> None:
        """Note the bytes of a step without KV memory. Other threads may have taken some of them."""
        excess = peak_bytes - self._estimate(num_tokens, num_logits)
        self._excess_bytes = max(excess, self._excess_bytes * 3 // 4)

    def fade(self, seconds: float) -> None:
        """Forget measurements after seconds without a step: half of them in five seconds."""
        self._excess_bytes = int(self._excess_bytes * 0.5 ** (seconds / 5))

    def _estimate(self, num_tokens: int, num_logits: int) -> int:
        full = self._activations(self.max_tokens, self._max_num_seqs)
        return self.whole_bytes * self._activations(num_tokens, num_logits) // full if full else 0

    def _activations(self, num_tokens: int, num_logits: int) -> int:
        return self._own.activation_bytes(
            max(num_tokens, self._least_tokens), min(num_tokens, num_logits * self._logits_each)
        )


def measured_step_bytes(
    config: EngineConfig,
    loaded: LoadedModel,
    provider: MemoryProvider,
    meter: CudaPeak,
    vision: Vision | None = None,
) -> int | None:
    """Measure a step's bytes without weights and KV memory; None for an encoder-decoder.

    With ``vision`` an image is tried out before it, as in the engine.

    Raises: ConfigError, UnsupportedModel; MemoryUnavailable where the device has too little for it.
    """
    if loaded.spec.source_tokens:  # a trial step would need a source
        return None
    spec = stored_spec(config, loaded.spec)
    try:
        peak_bytes = _peak_bytes(config, loaded, spec, provider, meter, vision)
    except torch.OutOfMemoryError as error:
        raise MemoryUnavailable(
            f"the device has too little memory for one step of {loaded.name}: lower "
            f"max_num_batched_tokens={config.max_num_batched_tokens} or "
            f"max_num_seqs={config.max_num_seqs}, or free memory there"
        ) from error
    log.info(
        "a step of %s tokens takes %s besides weights and KV memory",
        format_count(config.max_num_batched_tokens),
        format_bytes(peak_bytes),
    )
    return peak_bytes


def _peak_bytes(
    config: EngineConfig,
    loaded: LoadedModel,
    spec: ModelSpec,
    provider: MemoryProvider,
    meter: CudaPeak,
    vision: Vision | None,
) -> int:
    sizes = _sizes(config, loaded, spec, provider)
    with ExitStack() as undo:
        team = None
        if loaded.ranks is not None:
            team = loaded.ranks.team(spec, "paged", sizes, config)
            undo.callback(team.close)
        meter.begin()  # before the attention backend takes memory that it keeps
        model = assemble(loaded, spec, "paged", sizes, provider, config, team, vision=vision)
        undo.callback(model.kv.close)
        plan = _largest_step(config, sizes.max_model_len, loaded.vocab_size)
        _make_room(model, plan)
        LogitsSampler(config.seed).sample(model.runner.run(plan), plan)
        return meter.peak_bytes()


def _largest_step(config: EngineConfig, longest: int, vocab_size: int) -> StepPlan:
    """Make a plan of prompts of nearly equal lengths, none longer than a sequence may be.

    Drafts are among a step's tokens, and each has logits.
    """
    num_tokens, speculative = config.max_num_batched_tokens, config.speculative_config
    most_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    count = min(config.max_num_seqs, num_tokens)
    each = [num_tokens // count + (index < num_tokens % count) for index in range(count)]
    chunks = []
    for index, length in enumerate(each):
        length = min(length, longest - 1)
        num_prompt = length - min(most_drafts, length - 1)
        tokens = tuple(islice(cycle(range(vocab_size)), length))
        request = Request(request_id=index, prompt_token_ids=tokens[:num_prompt], params=DEAREST)
        sequence = Sequence(request=request, seq_id=index)
        drafts = tokens[num_prompt:]
        chunks.append(Chunk(sequence=sequence, start=0, stop=length, drafts=drafts, samples=True))
    return StepPlan.of(chunks)


def _sizes(
    config: EngineConfig, loaded: LoadedModel, spec: ModelSpec, provider: MemoryProvider
) -> CacheConfig:
    """Return sizes in blocks for any strategy: blocks take the least for many short sequences."""
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    num_tokens = config.max_num_batched_tokens + count * config.block_size
    return cache_sizes(
        replace(config, cache="paged", enable_prefix_caching=False),
        loaded.spec,
        page_bytes=provider.page_bytes,
        capacity_bytes=sum(
            whole_bytes(group, num_tokens, count, config.block_size, provider.page_bytes)
            for group in spec.groups
        ),
        can_share=False,
        max_mappings=None,
    )


def _make_room(model: Assembly, plan: StepPlan) -> None:
    """Take a plan's room in the cache. Raises: MemoryUnavailable."""
    accounting = model.kv.accounting
    for chunk in plan.chunks:
        accounting.add(chunk.sequence.seq_id)
        verdict = accounting.try_extend(chunk.sequence.seq_id, chunk.stop)
        assert isinstance(verdict, Fits), f"the cache of one step is too small: {verdict}"
    model.kv.carry_out()
    model.kv.require()
