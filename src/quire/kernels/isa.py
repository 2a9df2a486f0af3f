"""What a CPU has, as far as kernels differ by it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Isa:
    """What a CPU has, as far as kernels differ by it."""

    cpu: str  # LLVM's name
    features: str  # LLVM's list
    registers: int  # vectors of sixteen floats that fit into the registers
    f16: bool  # converts float16
    prefetch: bool  # waits for memory less if it is asked early
    bf16_convert: bool  # rounds float32 to bfloat16
    bf16_dot: bool  # multiplies pairs of bfloat16 in less time than it takes to make them float32
    amx: bool  # multiplies tiles of 16 x 32 bfloat16

    def without_amx(self) -> "Isa":
        return replace(self, amx=False)
