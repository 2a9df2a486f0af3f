"""Describe devices by name: their memory and speed, and the machine that a plan is made for.

A device's memory is the size that its driver reports, if a public listing of that was found, else
the size that its maker states. All of it counts as free, since the use by a driver, a display or
another process is not known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType

from quire.errors import ConfigError
from quire.memory.machine import DeviceMemory, Machine, MemoryBound, unified_memory_cap
from quire.planner.simulation.cost_model import Mixture, Product, RooflineCosts
from quire.planner.subject import Subject
from quire.spec import ModelSpec

# -- devices ---------------------------------------------------------------------------------------


_MIB, _GIB = 1 << 20, 1 << 30
_APPLE_PAGE, _CUDA_PAGE = 16 << 10, 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that a plan can name, and its memory."""

    name: str
    total_bytes: int
    source: str
    is_unified: bool = False  # the CPU and the GPU share the memory

    @property
    def page_bytes(self) -> int:
        """Return the size of a page of physical memory."""
        return _APPLE_PAGE if self.is_unified else _CUDA_PAGE


def _reported(name: str, mib: int) -> Device:
    return Device(name=name, total_bytes=mib * _MIB, source=f"nvidia-smi reports {mib:,} MiB")


def _stated(name: str, gib: int) -> Device:
    return Device(name=name, total_bytes=gib * _GIB, source=f"the maker states {gib} GB")


def _apple(gib: int) -> Device:
    return Device(
        name=f"Apple silicon, {gib} GB",
        total_bytes=gib * _GIB,
        source="Apple's size, unified memory",
        is_unified=True,
    )


# An Apple chip, its sizes of memory in GB, and the bandwidth of each in GB/s.
_APPLE_CHIPS: tuple[tuple[str, float, Mapping[int, float]], ...] = (
    # name, teraflops, {GB: GB/s}
    ("m3", 4.1, dict.fromkeys((8, 16, 24), 100)),
    ("m3-pro", 7.4, dict.fromkeys((18, 36), 150)),
    ("m3-max", 14.2, {36: 300, 48: 400, 64: 400, 96: 300, 128: 400}),
    ("m3-ultra", 28.4, dict.fromkeys((96, 256, 512), 819)),
    ("m4", 4.6, dict.fromkeys((16, 24, 32), 120)),
    ("m4-pro", 9.2, dict.fromkeys((24, 48, 64), 273)),
    ("m4-max", 18.4, {36: 410, 48: 546, 64: 546, 128: 546}),
)


def _apple_chips() -> Iterator[tuple[str, str, int, float, float]]:
    """Yield the key, name, gigabytes, teraflops and gigabytes a second of each chip and size."""
    for chip, teraflops, sizes in _APPLE_CHIPS:
        for gib, rate in sizes.items():
            words = " ".join(word.capitalize() for word in chip.split("-"))
            yield f"apple-{chip}-{gib}gb", f"Apple {words}, {gib} GB", gib, teraflops, rate


# docs/reference/planning.md has the source of each, and its date.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "t4": _reported("NVIDIA T4 16 GB", 15_360),
        "v100-16gb": _stated("NVIDIA V100 SXM2 16 GB", 16),
        "v100": _reported("NVIDIA V100 SXM2 32 GB", 32_768),
        "a10": _reported("NVIDIA A10 24 GB", 23_028),
        "a10g": _reported("NVIDIA A10G 24 GB", 23_028),
        "l4": _reported("NVIDIA L4 24 GB", 23_034),
        "l40s": _reported("NVIDIA L40S 48 GB", 46_068),
        "rtx-a6000": _reported("NVIDIA RTX A6000 48 GB", 49_140),
        "rtx3090": _reported("NVIDIA RTX 3090 24 GB", 24_576),
        "rtx4090": _reported("NVIDIA RTX 4090 24 GB", 24_564),
        "rtx5090": _reported("NVIDIA RTX 5090 32 GB", 32_607),
        "rtx-pro-6000": _reported("NVIDIA RTX PRO 6000 Blackwell 96 GB", 97_887),
        "a100-40gb": _reported("NVIDIA A100 40 GB", 40_960),
        "a100": _reported("NVIDIA A100 80 GB", 81_920),
        "h100": _reported("NVIDIA H100 80 GB", 81_559),
        "h200": _reported("NVIDIA H200 141 GB", 143_771),
        "b200": _reported("NVIDIA B200 180 GB", 183_359),
        "gb200": _reported("NVIDIA GB200 192 GB", 189_471),
        "b300": _reported("NVIDIA B300 288 GB", 275_040),
        "mi300x": _stated("AMD MI300X", 192),
        "mi325x": _stated("AMD MI325X", 256),
        "mi355x": _stated("AMD MI355X", 288),
        **{f"apple-{gib}gb": _apple(gib) for gib in (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 512)},
        **{key: replace(_apple(gib), name=name) for key, name, gib, _, _ in _apple_chips()},
    }
)

_MAKERS = ("nvidia-", "geforce-", "tesla-", "quadro-", "amd-", "instinct-", "radeon-")
# What makers put behind a device's name, and how a name is also written.
_ALSO = MappingProxyType(
    {
        "a100-80gb": "a100",
        "rtx-6000-pro": "rtx-pro-6000",
        "rtx6000-pro": "rtx-pro-6000",
        "rtxpro6000": "rtx-pro-6000",
        "a6000": "rtx-a6000",
    }
)
# Words behind a name that make it another card, slower or with other memory.
_OTHER_CARDS = frozenset(("laptop", "mobile", "mig", "maxq"))
_NAMESAKES: Mapping[str, frozenset[str]] = MappingProxyType(
    {"h100": frozenset(("pcie", "nvl")), "h200": frozenset(("nvl",))}
)


def device_key(name: str) -> str:
    """Find the name of ``DEVICES`` that is meant, as drivers, makers and people write it.

    In any case, with or without the maker, with blanks or hyphens, and with what follows a hyphen:
    ``NVIDIA H100 80GB HBM3`` is ``h100``. The beginning of one name alone is enough.

    Raises: ConfigError with the nearest name.
    """
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    key = key.replace("max-q", "maxq")
    for maker in _MAKERS:
        key = key.removeprefix(maker)
    if key.startswith(("m3-", "m4-")) or key in ("m3", "m4"):
        key = f"apple-{key}"
    spelled = {_joined(known): known for known in (*DEVICES, *_ALSO)}
    parts = key.split("-")
    for count in range(len(parts), 0, -1):
        if (known := spelled.get("".join(parts[:count]))) is not None:
            known = _ALSO.get(known, known)
            sized = (f"{known}-{part}" for part in parts[count:])
            found = next((each for each in sized if each in DEVICES), known)
            _refuse_another_card(name, found, parts[count:])
            return found
    begun = [known for known in DEVICES if f"{known}-".startswith(f"{key}-")]
    if len(begun) == 1:
        return begun[0]
    near = get_close_matches(key, DEVICES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if begun:
        hint = f"several begin so: {', '.join(begun)}. "
    raise ConfigError(
        f"device {name!r} is unknown; {hint}known: {named_devices()}. "
        "For another device, give its size: --memory 80GB"
    )


def _refuse_another_card(name: str, known: str, words: Sequence[str]) -> None:
    """Refuse a name whose further words say that it is another card than ``known``."""
    if said := (_OTHER_CARDS | _NAMESAKES.get(known, frozenset())).intersection(words):
        raise ConfigError(
            f"device {name!r} is unknown: {' '.join(sorted(said))} makes it another card than "
            f"{known!r}. Give its own memory, for the speed of that one: --device {known} "
            "--memory 80GB"
        )


def _joined(key: str) -> str:
    return key.replace("-", "")


def named_devices() -> str:
    """List the names of devices, Apple's chips by one name for all their sizes of memory."""
    plain = [key for key in DEVICES if not key.startswith("apple-")]
    chips = [f"apple-{chip}-{'/'.join(map(str, sizes))}gb" for chip, _, sizes in _APPLE_CHIPS]
    sizes = [
        key.split("-")[1].removesuffix("gb")
        for key in DEVICES
        if key.count("-") == 1 and key.startswith("apple-")
    ]
    return ", ".join([*plain, f"apple-{'/'.join(sizes)}gb", *chips])


def device(name: str) -> Device:
    """Find a device by its name. Raises: ConfigError with the nearest name."""
    return DEVICES[device_key(name)]


def machine_with(found: Device) -> Machine:
    """Make a machine with this device; unified memory has a limit for the GPU's part."""
    bound = MemoryBound(source=found.name, limit_bytes=found.total_bytes, used_bytes=0)
    if found.is_unified:
        return Machine(
            bounds=(bound,),
            ram_bytes=found.total_bytes,
            working_set_bytes=unified_memory_cap(found.total_bytes),
        )
    memory = DeviceMemory(
        name=found.name, total_bytes=found.total_bytes, free_bytes=found.total_bytes
    )
    return Machine(bounds=(bound,), ram_bytes=found.total_bytes, device=memory)


def machine_of(memory_bytes: int) -> Machine:
    """Make a machine that runs the model on its CPU, with this many bytes of free memory."""
    bound = MemoryBound(source="--memory", limit_bytes=memory_bytes, used_bytes=0)
    return Machine(bounds=(bound,), ram_bytes=memory_bytes)


# -- speeds ----------------------------------------------------------------------------------------

# The share of the published peaks that serving reaches, the time of a step and of each layer in
# which nothing else can run, and the latency of an exchange between ranks. They are the same for
# every model and device: rounded from a fit to what others have measured, which
# benchmarks/planner/bench_published.py repeats. For figures of a machine that you have, calibrate.
COMPUTE_FRACTION, BANDWIDTH_FRACTION = 0.6, 0.8
EXPERT_FRACTION = 0.15  # of products with many experts, each of few tokens
STEP_S, LAYER_S = 0.0005, 80e-6
EXCHANGE_S = 10e-6
_EXCHANGES = 2  # of hidden states in each layer: behind attention, and behind the feed-forward part


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A device's peaks: dense products, memory bandwidth, and links in one direction."""

    flops_per_s: float  # in 16 bits
    flops_8_per_s: float  # in eight, of floats
    flops_4_per_s: float
    bytes_per_s: float
    host_bytes_per_s: float
    link_bytes_per_s: float  # to other devices of a replica

    def flops_in(self, bits: int) -> float:
        """Return the peak in 4, 8 or 16 bits; of wider products where it has none so narrow."""
        if bits <= 4:
            return self.flops_4_per_s
        return self.flops_8_per_s if bits <= 8 else self.flops_per_s


def _speed(
    teraflops: float,
    gigabytes: float,
    host_gigabytes: float,
    *,
    tera_8: float = 0,
    tera_4: float = 0,
    link: float = 0,
) -> Speed:
    """Return the peaks in SI units; what a device lacks is done by what it has."""
    tera_8 = tera_8 or teraflops
    return Speed(
        flops_per_s=teraflops * 1e12,
        flops_8_per_s=tera_8 * 1e12,
        flops_4_per_s=(tera_4 or tera_8) * 1e12,
        bytes_per_s=gigabytes * 1e9,
        host_bytes_per_s=host_gigabytes * 1e9,
        link_bytes_per_s=(link or host_gigabytes) * 1e9,
    )


# Teraflops without sparsity, with sums in 32 bits; links in one direction. The sources
# are in docs/concepts/simulator.md.
SPEEDS: Mapping[str, Speed] = MappingProxyType(
    {
        "t4": _speed(65, 320, 16),
        **dict.fromkeys(("v100-16gb", "v100"), _speed(125, 900, 16, link=150)),
        "a10": _speed(125, 600, 32),
        "a10g": _speed(70, 600, 32),
        "l4": _speed(121, 300, 32, tera_8=242),
        "l40s": _speed(362, 864, 32, tera_8=733),
        "rtx-a6000": _speed(155, 768, 32),
        "rtx3090": _speed(71, 936, 32),
        "rtx4090": _speed(165, 1008, 32, tera_8=330),
        "rtx5090": _speed(210, 1792, 64, tera_8=419, tera_4=1676),
        "rtx-pro-6000": _speed(468, 1792, 64, tera_8=936, tera_4=1871),
        "a100-40gb": _speed(312, 1555, 32, link=300),
        "a100": _speed(312, 2039, 32, link=300),
        "h100": _speed(989, 3350, 64, tera_8=1979, link=450),
        "h200": _speed(989, 4800, 64, tera_8=1979, link=450),
        "b200": _speed(2250, 8000, 64, tera_8=4500, tera_4=9000, link=900),
        "gb200": _speed(2500, 8000, 64, tera_8=5000, tera_4=10_000, link=900),
        "b300": _speed(2250, 8000, 128, tera_8=4500, tera_4=14_000, link=900),
        "mi300x": _speed(1307, 5300, 64, tera_8=2614, link=448),
        "mi325x": _speed(1307, 6000, 64, tera_8=2614, link=448),
        "mi355x": _speed(2500, 8000, 64, tera_8=5000, tera_4=10_000, link=448),
        # The host's memory is the device's.
        **{key: _speed(tera, rate, rate) for key, _, _, tera, rate in _apple_chips()},
    }
)


def known_speed(name: str | None) -> str | None:
    """Return the key of a named device whose speed is known, or None."""
    try:
        key = device_key(name) if name is not None else None
    except ConfigError:
        return None
    return key if key in SPEEDS else None


def named_speeds() -> str:
    """List the devices whose speeds are known."""
    plain = [key for key in SPEEDS if not key.startswith("apple-")]
    return ", ".join([*plain, "apple-m3-… and apple-m4-…"])


def roofline(
    subject: Subject,
    on_rank: ModelSpec,
    name: str,
    num_ranks: int,
    *,
    expert_skew: float = 0.0,
) -> RooflineCosts:
    """Make a cost model of a named device, or of ``num_ranks`` of them that share the weights.

    Of a mixture, a step reads the experts that its tokens choose: all alike, or with a skew.

    Raises: ConfigError for a device of unknown speed, or a skew below 0.
    """
    key = known_speed(name)
    if key is None:
        raise ConfigError(
            f"the speed of {name!r} is unknown; known: {named_speeds()}. For another machine, "
            f"calibrate on it: quire bench --calibrate OUT.json, then --calibration OUT.json"
        )
    speed = SPEEDS[key]
    counts, sizes, precision = subject.parameters, subject.weights, subject.precision
    wide = COMPUTE_FRACTION * speed.flops_per_s
    coded = COMPUTE_FRACTION * speed.flops_in(precision.computes_in_bits)

    def product(num_bytes: int, num_weights: float, *, is_coded: bool) -> Product:
        return Product(
            num_bytes=num_bytes / num_ranks,
            flops_per_token=2 * num_weights / num_ranks,
            flops_per_s=coded if is_coded else wide,
        )

    experts = mixture = None
    if subject.num_experts:
        experts = product(sizes.experts, subject.chosen_experts, is_coded=True)
        of_experts = EXPERT_FRACTION / COMPUTE_FRACTION
        experts = replace(experts, flops_per_s=of_experts * experts.flops_per_s)
        mixture = Mixture(subject.num_experts, subject.num_chosen, expert_skew)
    exchanges = _EXCHANGES * subject.spec.num_layers if num_ranks > 1 else 0
    # An all-reduce sends each element twice, less what a rank has of it already.
    sent = 2 * (num_ranks - 1) / num_ranks * subject.own.hidden_size * subject.own.item_bytes
    return RooflineCosts(
        flops_per_s=wide,
        bytes_per_s=BANDWIDTH_FRACTION * speed.bytes_per_s,
        host_bytes_per_s=BANDWIDTH_FRACTION * speed.host_bytes_per_s,
        step_s=STEP_S + subject.spec.num_layers * LAYER_S + exchanges * EXCHANGE_S,
        products=(
            product(sizes.attention, counts.attention, is_coded=precision.codes_attention),
            product(
                sizes.dense + sizes.small,
                counts.dense + counts.small,
                is_coded=precision.codes_dense,
            ),
        ),
        head=product(sizes.as_head, counts.as_head, is_coded=False),
        experts=experts,
        mixture=mixture,
        flops_per_pair=subject.pair_flops / num_ranks,
        entry_bytes=on_rank.bytes_per_token,
        activation_bytes=subject.own.item_bytes
        * (subject.passed.whole + subject.passed.divided / num_ranks),
        state_bytes=on_rank.state_bytes,
        exchange_s_per_token=exchanges * sent / (BANDWIDTH_FRACTION * speed.link_bytes_per_s),
    )
