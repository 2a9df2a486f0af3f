"""How many bytes the KV cache may take: five rules in one vocabulary, each a pure function.

The *hint* is what a process should use at most, whatever others do; the *ram cap* what is left to a
GPU that shares memory with the system; *utilization* the share that a rule claims; *used* what is
gone; *headroom* what stays free. ``docs/concepts/budget.md`` has the rules side by side.

Whatever a rule says, KV memory above the *room* is refused: what is available within the tightest
limit, less weights that are still to come and activations. A limit on addresses (``ulimit -v``)
also counts what is only reserved: windows, libraries, the stacks of threads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from quire.memory.budget.ledger import Ledger, Needs, Remedy, Term
from quire.memory.machine.machine_state import Machine, unified_memory_cap
from quire.memory.machine.probe import MemoryBound
from quire.units import ceil_div, format_bytes, format_count

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
# A thread takes an arena of malloc, 64 MiB of addresses, and a stack of 8; a load may begin two
# more than the load before it.
_MORE_THREADS_BYTES = 2 * 72 * _MIB
DEFAULT_UTILIZATION = 0.9  # vLLM's, mistral.rs's server's
GIVEN = "given"  # no rule: the user has said how many bytes

Mode: TypeAlias = Literal["shared", "dedicated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """The facts that a rule decides by."""

    machine: Machine
    needs: Needs
    utilization: float
    mode: Mode

    @property
    def bounds(self) -> tuple[MemoryBound, ...]:
        """The limits on KV memory, where it goes."""
        on_device = self.machine.device is not None
        return (self.machine.tightest,) if on_device else self.machine.bounds

    @property
    def room(self) -> tuple[int, MemoryBound]:
        """The most that KV memory can take in bytes, and the limit that says so."""
        return min(
            ((self.room_in(bound), bound) for bound in self.bounds), key=lambda pair: pair[0]
        )

    @property
    def room_bytes(self) -> int:
        return self.room[0]

    @property
    def shared_limit_bytes(self) -> int:
        """The tightest limit of those that others may use up too."""
        return min(bound.limit_bytes for bound in self.bounds if not bound.counts_addresses)

    def spare_bytes(self, kv_bytes: int) -> int:
        """Return what ``kv_bytes`` of KV memory leave where others take memory too."""
        shared = (bound for bound in self.bounds if not bound.counts_addresses)
        return max(0, min(self.room_in(bound) for bound in shared) - kv_bytes)

    @property
    def lasting_bytes(self) -> int:
        """Bytes to name as fitting: a little less, since the figures move between two runs."""
        room_bytes, bound = self.room
        lasting = room_bytes * 49 // 50
        if bound.counts_addresses:
            lasting -= _MORE_THREADS_BYTES // self.needs.addresses_per_byte
        return max(min(room_bytes, self.needs.least_bytes), lasting)

    def room_in(self, bound: MemoryBound) -> int:
        """Return the most bytes for KV memory, if this were the only limit."""
        needs = self.needs
        left = bound.available_bytes - needs.weights_to_come_bytes - needs.besides_bytes
        if bound.counts_addresses:
            return (left - needs.address_bytes) // needs.addresses_per_byte
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """A rule's answer, before it is checked against the room that there is."""

    terms: tuple[Term, ...]
    bound: str
    why_not: str | None = None  # it refuses by itself
    remedies: tuple[Remedy, ...] = ()  # should it not do, what may be tried, the best first
    committed_whole: bool = False
    may_be_capped: bool = True
    leaves_headroom: bool = False  # it has counted the headroom, whole

    @property
    def kv_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


def make_ledger(
    machine: Machine | None,
    needs: Needs,
    *,
    budget: str = "auto",
    utilization: float | None = None,
    mode: Mode = "shared",
    kv_cache_memory_bytes: int | None = None,
) -> Ledger:
    """Make the ledger of a rule on this machine. ``kv_cache_memory_bytes`` overrides the rules.

    ``machine``: None where the system says nothing about memory; the ledger gives what is stated.
    """
    if machine is None:
        assert kv_cache_memory_bytes is not None, "there is nothing that a rule could go by"
        return _unchecked(kv_cache_memory_bytes, needs)
    case = _Case(
        machine=machine,
        needs=needs,
        utilization=DEFAULT_UTILIZATION if utilization is None else utilization,
        mode=mode,
    )
    if kv_cache_memory_bytes is None:
        rule, offer = budget, BUDGETS[budget](case)
    else:
        rule, offer = GIVEN, _given(kv_cache_memory_bytes)
    refusal = _refusal(rule, offer, case)
    terms, bound = offer.terms, offer.bound
    unused = 0 if needs.most_bytes is None else max(0, offer.kv_bytes - needs.most_bytes)
    if refusal is not None or not offer.may_be_capped:
        unused = 0
    if unused:
        bound = "max_num_seqs × max_model_len"
        terms = (*terms, Term(label="never usable", num_bytes=-unused, source=bound))
    spare = None if offer.leaves_headroom else case.spare_bytes(offer.kv_bytes - unused)
    headroom = headroom_bytes(case.shared_limit_bytes, mode, spare_bytes=spare)
    return Ledger(
        rule=rule,
        terms=terms,
        bound=bound,
        state_bytes=needs.state_bytes,
        unused_bytes=unused,
        spare_bytes=spare,
        step_bytes=needs.step_bytes,
        encoder_bytes=needs.encoder_bytes,
        headroom_bytes=headroom,
        headroom_source=_headroom_words(case, headroom),
        room_bytes=case.room_bytes,
        room_source=case.room[1].source,
        committed_whole=offer.committed_whole,
        refusal=refusal,
        remedy=None if refusal is None else next(_remedies(case, offer), None),
    )


def headroom_bytes(limit_bytes: int, mode: Mode, *, spare_bytes: int | None = None) -> int:
    """Return the bytes that stay free for others, in the ledger and while the ceiling moves.

    ``spare_bytes``: what a stated budget leaves of the room; None: its rule leaves the headroom.
    Half of what is left is the headroom then, if that is less: the other half is for what this
    process takes later.

    Source: shared is vllm-metal's floor under free memory; dedicated is mistral.rs's headroom.
    """
    if mode == "dedicated":
        share = max(limit_bytes * 2 // 100, min(512 * _MIB, limit_bytes // 4))
    else:
        share = max(min(4 * _GIB, limit_bytes // 4), limit_bytes * 15 // 100)
    return share if spare_bytes is None else min(share, max(0, spare_bytes) // 2)


# -- the rules -------------------------------------------------------------------------------------


def _auto(case: _Case) -> _Offer:
    """available within the tightest limit − headroom − weights to come − activations"""
    needs, bounds, shared = case.needs, case.bounds, case.shared_limit_bytes
    headroom = headroom_bytes(shared, case.mode)

    def left(bound: MemoryBound, mode: Mode) -> int:
        # No other process takes this one's addresses.
        spared = 0 if bound.counts_addresses else headroom_bytes(shared, mode)
        return case.room_in(bound) - spared

    bound = min(bounds, key=lambda bound: left(bound, case.mode))
    terms = [
        Term(label="limit", num_bytes=bound.limit_bytes, source=bound.source),
        Term(
            label="used",
            num_bytes=bound.available_bytes - bound.limit_bytes,
            source=_used_words(case.machine, bound),
        ),
        *_still_to_come(needs),
    ]
    if bound.counts_addresses:
        besides = case.room_in(bound) - sum(term.num_bytes for term in terms)
        words = "libraries, threads, windows: this limit counts them"
        terms.append(Term(label="addresses", num_bytes=besides, source=words))
    else:
        terms.insert(
            2, Term(label="headroom", num_bytes=-headroom, source=_headroom_words(case, headroom))
        )
    dedicated = Remedy(option="memory_mode", value="dedicated")
    enough = min(left(bound, "dedicated") for bound in bounds) >= needs.least_bytes
    helps = case.mode == "shared" and enough
    remedies = (dedicated,) if helps else ()
    return _Offer(terms=tuple(terms), bound=bound.source, remedies=remedies, leaves_headroom=True)


def _vllm(case: _Case) -> _Offer:
    """hint × utilization − weights − activations"""
    return _claim(case, *case.machine.hint)


def _fraction(case: _Case) -> _Offer:
    """total × fraction − weights − activations: the total is RAM, whatever limits it"""
    device = case.machine.device
    if device is not None:
        return _claim(case, device.total_bytes, device.name)
    return _claim(case, case.machine.ram_bytes, "RAM")


def _mistralrs(case: _Case) -> _Offer:
    """min(hint, ram cap) × utilization − weights − activations"""
    hint, source = case.machine.hint
    cap = unified_memory_cap(case.machine.ram_bytes) if case.machine.device is None else hint
    if cap < hint:
        hint, source = cap, "ram cap (2/3 or 3/4 of RAM)"
    offer = _claim(case, hint, source)
    # Weights come first, into what this process has not allocated of the hint.
    others_aside = case.machine.own_bytes - case.needs.counted_weights_bytes
    free = case.machine.hint[0] - max(0, others_aside)
    spare = max(free * 2 // 100, 512 * _MIB)
    if case.needs.weights_bytes + spare <= free:
        return offer
    why = (
        f"weights of {format_bytes(case.needs.weights_bytes)} and {format_bytes(spare)} of "
        f"headroom are more than {format_bytes(free)}"
    )
    return _Offer(terms=offer.terms, bound=offer.bound, why_not=why)


def _llamacpp(case: _Case) -> _Offer:
    """the context that was asked for, whole, if hint − allocated has it"""
    needs, (hint, source) = case.needs, case.machine.hint
    asked = needs.context_tokens * needs.bytes_per_token + needs.state_bytes
    allocated = max(case.machine.own_bytes, needs.counted_weights_bytes)
    terms = (
        Term(label="hint", num_bytes=hint, source=source),
        Term(label="allocated", num_bytes=-allocated, source="by this process"),
        *_still_to_come(needs),
    )
    left = sum(term.num_bytes for term in terms)
    words = f"max_model_len={format_count(needs.context_tokens)} tokens, committed whole"
    label = "not asked for" if left >= asked else "asked for beyond"
    for_tokens = min(left, case.lasting_bytes) - needs.state_bytes
    shorter = for_tokens // max(1, needs.bytes_per_token)
    enough = shorter * needs.bytes_per_token + needs.state_bytes >= needs.least_bytes
    helps = shorter >= 2 and enough
    return _Offer(
        terms=(*terms, Term(label=label, num_bytes=asked - left, source=words)),
        bound="max_model_len",
        why_not=f"{format_bytes(asked)} is more than the hint has left" if left < asked else None,
        remedies=(Remedy(option="max_model_len", value=str(shorter)),) if helps else (),
        committed_whole=True,
        may_be_capped=False,
    )


def _given(asked_bytes: int) -> _Offer:
    """kv_cache_memory_bytes"""
    term = Term(label="asked for", num_bytes=asked_bytes, source="kv_cache_memory_bytes")
    return _Offer(terms=(term,), bound="kv_cache_memory_bytes", may_be_capped=False)


def _unchecked(asked_bytes: int, needs: Needs) -> Ledger:
    """Make the ledger of stated bytes where the system does not say whether there is room."""
    offer = _given(asked_bytes)
    return Ledger(
        rule=GIVEN,
        terms=offer.terms,
        bound=offer.bound,
        state_bytes=needs.state_bytes,
        step_bytes=needs.step_bytes,
        encoder_bytes=needs.encoder_bytes,
        room_bytes=asked_bytes,
        room_source="not checked: the system does not say",
    )


BUDGETS: Mapping[str, Callable[[_Case], _Offer]] = MappingProxyType(
    {
        "auto": _auto,
        "vllm": _vllm,
        "mistralrs": _mistralrs,
        "llamacpp": _llamacpp,
        "fraction": _fraction,
    }
)
# Rules that take what this process has already from what there is.
BY_OWN_MEMORY = frozenset({"mistralrs", "llamacpp"})


def _claim(case: _Case, total_bytes: int, source: str) -> _Offer:
    """A share of a total, whatever others use of it: what three of the rules have in common."""
    needs = case.needs
    claimed = int(total_bytes * case.utilization)
    words = f"memory_utilization={case.utilization:g}"
    terms = (
        Term(label="hint", num_bytes=total_bytes, source=source),
        Term(label="not claimed", num_bytes=claimed - total_bytes, source=words),
        Term(label="weights", num_bytes=-needs.weights_bytes, source="loaded or to come"),
        *_besides(needs),
    )
    besides = needs.weights_bytes + needs.besides_bytes
    low, high = besides + needs.least_bytes, besides + case.lasting_bytes
    shares = _shares(low, high, total_bytes, greatest=claimed > high)
    remedies = tuple(Remedy(option="memory_utilization", value=share) for share in shares)
    return _Offer(terms=terms, bound=f"{words} of {source}", remedies=remedies)


def _still_to_come(needs: Needs) -> tuple[Term, ...]:
    loaded = needs.counted_weights_bytes
    source = f"{format_bytes(loaded)} more are among what is used" if loaded else "to be loaded"
    return (
        Term(label="weights", num_bytes=-needs.weights_to_come_bytes, source=source),
        *_besides(needs),
    )


def _besides(needs: Needs) -> tuple[Term, ...]:
    source = needs.activation_source
    terms = [Term(label="activations", num_bytes=-needs.activation_bytes, source=source)]
    if needs.encoder_excess_bytes:
        source = (
            f"the largest image or video takes {format_bytes(needs.encoder_bytes)}, before a step"
        )
        terms.append(Term(label="encoder", num_bytes=-needs.encoder_excess_bytes, source=source))
    if needs.graph_bytes:
        source = "estimate for steps of max_num_seqs tokens"
        terms.append(Term(label="CUDA graphs", num_bytes=-needs.graph_bytes, source=source))
    if needs.swap_buffer_bytes:
        source = "two, for what swap_space takes and gives back"
        terms.append(Term(label="swap buffers", num_bytes=-needs.swap_buffer_bytes, source=source))
    if needs.image_bytes:
        source = "features, of max_num_batched_tokens or the largest image"
        terms.append(Term(label="images", num_bytes=-needs.image_bytes, source=source))
    if needs.tier_bytes:
        source = "kv_offloading_size and memory: tiers, and blocks on their way"
        terms.append(Term(label="tiers", num_bytes=-needs.tier_bytes, source=source))
    return tuple(terms)


def _used_words(machine: Machine, bound: MemoryBound) -> str:
    if bound.counts_addresses:
        return "by this process"
    if machine.device is None:
        return "by all, this process too"
    own, others = machine.device.own_bytes, machine.device.others_bytes
    return f"{format_bytes(others)} by others and the driver, {format_bytes(own)} by this process"


def _headroom_words(case: _Case, headroom: int) -> str:
    if headroom < headroom_bytes(case.shared_limit_bytes, case.mode):
        return "half of what this budget leaves"
    if case.mode == "dedicated":
        return "memory_mode=dedicated: max(2 %, min(512 MiB, 1/4))"
    return "memory_mode=shared: max(min(4 GiB, 1/4), 15 %)"


# -- refusals --------------------------------------------------------------------------------------


def _refusal(rule: str, offer: _Offer, case: _Case) -> str | None:
    """Say why the offer cannot be taken; None if it can."""
    kv, least, (room, bound) = offer.kv_bytes, case.needs.least_bytes, case.room
    name = f"budget={rule}: {format_bytes(kv)} for KV"
    if rule == GIVEN:
        name = f"kv_cache_memory_bytes={format_bytes(kv)}"
    there = f"{format_bytes(max(0, room))} ({bound.source})"
    if offer.why_not is not None:
        return f"budget={rule}: {offer.why_not}; the machine has {there}"
    if kv > room:
        return f"{name} is more than the machine has available, {there}"
    if rule != GIVEN and kv < least:
        return (
            f"budget={rule} leaves {format_bytes(max(0, kv))} for KV, and {format_bytes(least)} is "
            f"the least of use; the machine has {there}"
        )
    return None


def _remedies(case: _Case, offer: _Offer) -> Iterator[Remedy]:
    """Yield the rule's own option; then bytes, which no rule refuses while there is room."""
    yield from offer.remedies
    if case.needs.least_bytes <= case.room_bytes:
        # As much as fits was asked for; where a rule had left too little, a little is the answer.
        wants_all = offer.kv_bytes > case.room_bytes
        low, high = case.needs.least_bytes, case.lasting_bytes
        yield Remedy(option="kv_cache_memory_bytes", value=_size(low, high, greatest=wants_all))


def _size(low: int, high: int, *, greatest: bool) -> str:
    """Write a number of bytes in [low, high] in a short way."""
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", _KIB)):
        count = high // size if greatest else ceil_div(low, size)
        if low <= count * size <= high and (count >= 10 or size == _KIB or not greatest):
            return f"{count}{unit}"
    return str(high if greatest else low)


def _shares(low: int, high: int, total: int, *, greatest: bool) -> Iterator[str]:
    """Yield a share of ``total`` in [low, high] bytes, in few digits, if there is one."""
    for digits in (2, 3, 4, 6, 9):
        step = 10**digits
        most, least = min(step, high * step // total), max(1, ceil_div(low * step, total))
        share = most if greatest else least
        if least <= most and low <= int(total * (share / step)) <= high:
            yield f"{share / step:.{digits}f}"
            return


# -- footprint -------------------------------------------------------------------------------------

# A model's own bytes: its weights, and an estimate of what one step computes in between. They come
# from a model in memory, or from its files alone.

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFootprint:
    """What the largest image or video of a prompt takes, in the encoder and behind it."""

    num_values: int | None  # of the encoder's input; None: not measured
    num_tokens: int
    peak_bytes: int  # at the encoder's peak, besides weights
    row_bytes: int  # of one token's features, at all levels

    @classmethod
    def larger(cls, *several: "EncoderFootprint") -> "EncoderFootprint":
        """Return what any of them takes at most, at least one; their inputs are not the same."""
        return cls(
            num_values=None,
            num_tokens=max(each.num_tokens for each in several),
            peak_bytes=max(each.peak_bytes for each in several),
            row_bytes=max(each.row_bytes for each in several),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a model besides its cache."""

    weights_bytes: int
    counted_bytes: int  # of these, in pages that the system counts as used: not mapped from a file
    hidden_size: int
    widest_rows: int  # outputs a token has in the widest of the layers' products
    vocab_size: int
    item_bytes: int  # of an activation
    encoder: EncoderFootprint | None = None  # of a model that is shown images

    def activation_bytes(self, num_tokens: int, num_logits: int) -> int:
        """Estimate the bytes that one step over ``num_tokens`` holds at its peak.

        In a layer: the stream of hidden states and what is added to it, three of them once more in
        float32 for a norm, and three results of the widest product (gate, up, and both multiplied).
        After the layers: logits twice, and ten float32 copies where top-p sorts and filters them.
        """
        head = num_logits * self.vocab_size * (2 * self.item_bytes + 10 * _FLOAT32_BYTES)
        return max(self._layer_bytes(num_tokens), head)

    def graph_bytes(self, num_tokens: int) -> int:
        """Estimate the bytes that recorded steps of up to ``num_tokens`` keep, logits for each.

        They share the memory that they compute in, so that the largest counts, and their logits.
        Tokens are sampled outside.
        """
        return self._layer_bytes(num_tokens) + 2 * num_tokens * self.vocab_size * self.item_bytes

    def _layer_bytes(self, num_tokens: int) -> int:
        return num_tokens * (
            3 * self.widest_rows * self.item_bytes
            + self.hidden_size * (3 * self.item_bytes + 3 * _FLOAT32_BYTES)
        )
