"""What a call of a packed product tells its threads, and where a thread keeps what."""

from dataclasses import dataclass

from quire.kernels.compile import KINDS
from quire.kernels.language import LINE_BYTES, Isa
from quire.kernels.number_formats import KIND_BYTES
from quire.layers.cpu.packed_weight import BLOCK, PackedForm
from quire.units import align_up

FRAME = (
    "next_item", "next_thread",  # counters, shared by the threads
    "scratch", "scratch_bytes",  # of all threads; of one
    "items", "num_items",
    "x", "x_row", "num_rows", "num_inputs", "num_groups",
)  # fmt: skip
MATRIX = ("data", "num_outputs", "bias", "out", "out_row")  # of each weight, behind the frame
ITEM = ("matrix", "start", "stop")  # some blocks of a matrix
UNPACK_FRAME = ("next_item", "data", "start", "stop", "num_groups", "target", "target_row")
SUMS_BYTES = BLOCK * 4  # of a row, for the outputs of a block
_PAGE_BYTES = 4096
_KEPT_BYTES = 2**14  # of codes that stay in the nearest cache while rows pass by


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShape:
    """Everything that the machine code of a packed product depends on."""

    kind: str  # of inputs and outputs
    form: PackedForm
    activation: str | None = None  # of the first matrix's outputs, times the second's
    rounds_inputs: bool = False  # to one byte, where the CPU multiplies bytes

    def digits(self, isa: Isa) -> int:
        """Count the bytes that an input becomes where bytes are multiplied; else 0.

        Two of them are within 2 ** -16 of a group's largest input, three within 2 ** -24: as
        near as bfloat16 or float16, and as float32, are to numbers of that size. One is within
        2 ** -8, which is for those who ask for it.
        """
        if not isa.byte_dot:
            return 0
        if self.rounds_inputs:
            return 1
        return 3 if self.kind == "f32" else 2

    def rows(self, isa: Isa) -> tuple[int, ...]:
        """Tell how many rows share a load of weights: the most of them first."""
        if isa.registers < 32:
            return (1,)
        return {0: (4, 1), 1: (6, 4, 2, 1), 2: (3, 1), 3: (2, 1)}[self.digits(isa)]

    def group_bytes(self, isa: Isa) -> int:
        """Count the bytes of a row's inputs of a group, as they are multiplied."""
        return self.form.group_size * (self.digits(isa) or 4)

    def notes_bytes(self, isa: Isa) -> int:
        """Count those of what is noted of a row's group: where sums begin, a scale, their sum."""
        digits = self.digits(isa)
        return 4 * (digits + 2) if digits else 4

    @property
    def worth_keeping(self) -> int:
        """From how many rows on codes are made bytes first, once for all of them.

        Measured: 8 bits are made so by one instruction, which few rows need not share.
        """
        return 16 if self.form.bits == 4 else 64

    @property
    def kept_groups(self) -> int:
        """Of a block: how many have their codes kept as bytes at a time."""
        return max(1, _KEPT_BYTES // (BLOCK * self.form.group_size))

    @property
    def kept_bytes(self) -> int:
        return self.kept_groups * BLOCK * self.form.group_size

    @property
    def scale_kind(self) -> str:
        return KINDS[self.form.scale_dtype]

    @property
    def element_bytes(self) -> int:
        return KIND_BYTES[self.kind]

    def scratch_bytes(self, isa: Isa, num_rows: int, num_groups: int) -> int:
        """Count a thread's bytes: a line, sums of two blocks, kept codes, inputs and notes."""
        a_group = self.group_bytes(isa) + self.notes_bytes(isa)
        inputs = num_rows * num_groups * a_group
        sums = 2 * SUMS_BYTES * num_rows
        return align_up(LINE_BYTES + sums + self.kept_bytes + inputs, _PAGE_BYTES)
