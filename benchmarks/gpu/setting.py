"""What the parts of the GPU's benchmark share: where they run, how they time, what they say.

``emulated`` runs every line small on the CPU: Triton's interpreter or torch in a kernel's place,
the emulator of the driver in the driver's. Its times mean nothing.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.gpu.parts import tell
from quire.attention import AttentionBackend, ReferenceAttention, SdpaAttention
from quire.memory.cuda import CudaMemory
from quire.memory.cuda.driver import Driver, load_driver_functions
from quire.spec import FullAttention, Layer, ModelSpec

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    emulated: bool
    seed: int
    rounds: int

    @property
    def geometry(self) -> "Geometry":
        """Qwen3-4B's."""
        if self.emulated:
            return Geometry(num_layers=12, num_kv_heads=2, num_groups=2, head_dim=64)
        return Geometry(num_layers=36, num_kv_heads=8, num_groups=4, head_dim=128)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.emulated else "cuda")

    def memory(self) -> tuple[CudaMemory, Driver]:
        """Make the device's memory, none of it kept, and its driver."""
        if not self.emulated:
            functions = load_driver_functions()
            return CudaMemory(driver=functions, keep_bytes=0), Driver(functions, 0, 0)
        from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver

        emulator = EmulatedDriver(total_bytes=512 * MIB)
        memory = CudaMemory(driver=emulator, tensor_device=TENSOR_DEVICE, keep_bytes=0)
        return memory, Driver(emulator, 0, 0)

    def backends(self) -> dict[str, AttentionBackend]:
        """Return ours and FlashInfer's, by name, without those that ``missing`` names."""
        found: dict[str, AttentionBackend] = {}
        for name in ("triton", "flashinfer"):
            made = self._backend(name)
            if not isinstance(made, str):
                found[name] = made
        return found

    def missing(self) -> dict[str, str]:
        """Return why a backend cannot run, by its name."""
        tried = {name: self._backend(name) for name in ("triton", "flashinfer")}
        return {name: why for name, why in tried.items() if isinstance(why, str)}

    def _backend(self, name: str) -> AttentionBackend | str:
        try:
            return self._made(name)
        except Exception as error:  # a package that is broken: the other one is timed all the same
            return " ".join(repr(error).split())[:300]

    def _made(self, name: str) -> AttentionBackend | str:
        if name == "flashinfer":
            from quire.attention.flashinfer import FlashInferAttention
            from quire.attention.flashinfer.backend import cannot_run

            if self.emulated:
                from attention.pretend_flashinfer import pretended_backend

                return pretended_backend()
            return cannot_run(self.device) or FlashInferAttention()
        from quire.attention.triton import TritonAttention

        triton = TritonAttention()
        spec = FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16")
        return triton.unsupported(spec, self.device) or triton

    def ours(self) -> tuple[str, AttentionBackend]:
        """Return the backend that is compared: Triton's, or in an emulation without Triton torch's.

        Raises: RuntimeError where a GPU cannot run it.
        """
        backends = self.backends()
        if "triton" in backends:
            return "triton", backends["triton"]
        if not self.emulated:
            raise RuntimeError(f"our kernel cannot run: {self.missing()['triton']}")
        return "sdpa", SdpaAttention()

    def oracle(self) -> AttentionBackend:
        """Return the backend that results are compared with."""
        return ReferenceAttention() if self.emulated else SdpaAttention()

    def wait(self) -> None:
        """Wait for the device."""
        if not self.emulated:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Return the free bytes of the device, as every program on it sees them."""
        return 2 * GIB if self.emulated else torch.cuda.mem_get_info()[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The attention of a model."""

    num_layers: int
    num_kv_heads: int
    num_groups: int  # query heads for each of them
    head_dim: int

    @property
    def entry_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * 2

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.entry_bytes

    @property
    def spec(self) -> FullAttention:
        return FullAttention(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype="bfloat16"
        )

    def model(self, max_model_len: int) -> ModelSpec:
        """Make the spec of a model of these layers."""
        return ModelSpec(
            model_type="random",
            layers=tuple(Layer(specs=(self.spec,)) for _ in range(self.num_layers)),
            max_model_len=max_model_len,
            dtype="bfloat16",
        )


def show(title: str, columns: str, rows: list[list[str]]) -> None:
    """Tell a table; ``columns`` with " | " between them."""
    tell(table={"title": title, "columns": columns.split(" | "), "rows": rows})


def note(text: str) -> None:
    """Tell a line to a reader."""
    tell(note=text)


def claim(
    name: str,
    ours: float,
    peer: float | None,
    unit: str,
    goal: str,
    holds: bool,
    ratio: float | None = None,
    *,
    timed: bool = False,
) -> None:
    """Tell what was found beside a goal. ``timed``: a speed: an emulation says nothing of it."""
    if ratio is None and peer:
        ratio = ours / peer
    tell(
        claim={
            "claim": name,
            "ours": round(ours, 4),
            "peer": None if peer is None else round(peer, 4),
            "unit": unit,
            "ratio": None if ratio is None else round(ratio, 4),
            "goal": goal,
            "holds": holds,
            "timed": timed,
        }
    )


def median_ratio(ours: list[float], peer: list[float]) -> float:
    """Return how many times the peer's speed: the median over interleaved pairs of seconds."""
    return statistics.median(b / a for a, b in zip(ours, peer, strict=True))


def in_turns(
    setting: Setting, calls: Mapping[str, Callable[[], object]], *, inner: int = 10
) -> dict[str, list[float]]:
    """Measure seconds of each call, a sample a round, in turns; "NAME again" is a call's noise.

    On a GPU a sample is ``inner`` calls, played from one graph where they can be recorded, so that
    it has the time of the kernels and not of their launching.
    """
    samplers = {name: _sampler(setting, call, inner) for name, call in calls.items()}
    first = next(iter(calls))
    samplers[f"{first}, again"] = samplers[first]
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(setting.rounds):
        for name, sample in samplers.items():
            seconds[name].append(sample())
    return seconds


def _sampler(setting: Setting, call: Callable[[], object], inner: int) -> Callable[[], float]:
    call()  # compiles, plans
    setting.wait()
    if setting.emulated:

        def on_the_cpu() -> float:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun

        return on_the_cpu

    def several() -> None:
        for _ in range(inner):
            call()

    play = _recorded(several) or several
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def on_the_gpu() -> float:
        torch.cuda.synchronize()
        begin.record()
        play()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / inner

    on_the_gpu()
    return on_the_gpu


def _recorded(several: Callable[[], None]) -> Callable[[], None] | None:
    """Record the calls as one CUDA graph; None where they cannot be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            several()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            several()
    except RuntimeError as error:
        print(f"not recorded, launched each time: {' '.join(str(error).split())[:200]}")
        torch.cuda.synchronize()
        return None
    play: Callable[[], None] = graph.replay
    return play
