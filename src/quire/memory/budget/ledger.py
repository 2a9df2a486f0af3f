"""A budget that explains itself: a line a term, the limit that decided, the flag that would help.

``rules`` makes ledgers.
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that a model and a configuration need for KV memory and besides it."""

    weights_bytes: int
    # Of these, what the machine's figures count as used already. Weights that are mapped from a
    # file are not: the kernel calls such pages available, since it could read them again.
    counted_weights_bytes: int = 0
    activation_bytes: int = 0  # at their peak, in one step
    activation_source: str = "estimate for max_num_batched_tokens"
    graph_bytes: int = 0  # of recorded steps, which keep what they compute with
    swap_buffer_bytes: int = 0  # on a device, through which entries go to the host and back
    image_bytes: int = 0  # of features that are kept until their tokens are computed
    encoder_bytes: int = 0  # at the peak of the largest image's encoder, which runs before a step
    tier_bytes: int = 0  # host memory in which blocks outside the pool lie, or on their way
    bytes_per_token: int
    context_tokens: int  # the longest sequence
    address_bytes: int = 0  # of address space besides: windows, libraries, stacks of threads
    addresses_per_byte: int = 1  # of KV: each group of layers reserves for the whole of it
    least_bytes: int  # of KV, below which nothing useful runs
    most_bytes: int | None = None  # of KV, above which nothing more can be used
    state_bytes: int = 0  # of KV, for recurrent states and sources, of all sequences

    @property
    def weights_to_come_bytes(self) -> int:
        return self.weights_bytes - self.counted_weights_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes that steps need besides weights and KV."""
        return self.activation_bytes + self.graph_bytes + self.swap_buffer_bytes

    @property
    def encoder_excess_bytes(self) -> int:
        """Bytes that an image's encoder takes beyond the activations of its step, which follow."""
        return max(0, self.encoder_bytes - self.activation_bytes)

    @property
    def besides_bytes(self) -> int:
        """Bytes that are needed besides weights and KV."""
        return self.step_bytes + self.encoder_excess_bytes + self.image_bytes + self.tier_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One line of a ledger."""

    label: str
    num_bytes: int  # signed
    source: str  # where the number comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """An option and a value with which the same machine would say yes."""

    option: str
    value: str

    @property
    def flag(self) -> str:
        return f"--{self.option.replace('_', '-')} {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """How many bytes of KV memory there are, and why. The terms add up to it."""

    rule: str
    terms: tuple[Term, ...]
    bound: str  # what decided: a limit of the machine, or an option
    room_bytes: int  # the most that KV memory could take here, by any rule
    room_source: str  # which limit of the machine says so
    state_bytes: int = 0  # of KV memory, for recurrent states and sources, if all sequences run
    unused_bytes: int = 0  # that the rule would give above what can ever be used
    spare_bytes: int | None = None  # what is left of the room; None: the rule left the headroom
    step_bytes: int = 0  # what a step of max_num_batched_tokens takes at its peak
    encoder_bytes: int = 0  # what the encoder of the largest image takes at its peak, before that
    headroom_bytes: int = 0  # what the cache leaves to others from now on …
    headroom_source: str = ""  # … and why so much
    committed_whole: bool = False  # taken at the start, not as tokens come
    refusal: str | None = None
    remedy: Remedy | None = None  # of a refusal; None where no option helps

    @property
    def kv_bytes(self) -> int:
        """Bytes that the rule gives; where it refuses, those that it asked for."""
        return sum(term.num_bytes for term in self.terms)

    def explain(self) -> str:
        """Write the terms as text, a line each."""
        rows = [(term.label, term.num_bytes, term.source) for term in self.terms]
        rows.append((f"KV memory ({self.rule})", self.kv_bytes, self.bound))
        if self.state_bytes:
            words = "max_num_seqs × recurrent states and sources"
            rows.append(("of it for states, at most", self.state_bytes, words))
        rows.append(("the most that fits", max(0, self.room_bytes), self.room_source))
        says_so = any(term.label == "headroom" for term in self.terms)
        if self.refusal is None and self.headroom_source and not says_so:
            rows.append(("left to others", self.headroom_bytes, self.headroom_source))
        width = max(len(label) for label, *_ in rows)
        return "\n".join(
            f"  {label:{width}}  {format_bytes(num_bytes):>11}  {source}"
            for label, num_bytes, source in rows
        )

    def require(self) -> int:
        """Return the bytes. Raises: ConfigError with the whole ledger and the flag that helps."""
        if self.refusal is None:
            return self.kv_bytes
        raise ConfigError(f"{self.refusal}: {self.advice}\n{self.explain()}")

    @property
    def advice(self) -> str:
        """The way out of a refusal."""
        if self.remedy is not None:
            lower = "lower it, " if self.remedy.option == self.bound else ""
            return f"{lower}set {self.remedy.flag}"
        return (
            "no budget makes room here: free memory, raise that limit, or lower what is needed "
            "besides (a smaller model, max_num_batched_tokens, max_num_seqs)"
        )
