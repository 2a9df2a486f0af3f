"""A small language for kernels: Python that writes LLVM code, sixteen floats at a time.

A kernel is a function of 64-bit integers: byte addresses, byte strides and counts. LLVM turns a
vector of sixteen floats into what a CPU has: one register of AVX-512, two of AVX2, four of SSE or
NEON. So there is one source for all of them; only the number of registers (``Isa``) decides how
much a kernel keeps at hand.

``number_formats`` has what elements of memory may be besides floats. Nothing here knows attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import factorial, log

from llvmlite import ir
from llvmlite.ir import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Isa:
    """The features of a CPU by which kernels differ."""

    cpu: str  # LLVM's name
    features: str  # LLVM's list
    registers: int  # vectors of sixteen floats that fit into the registers
    f16: bool  # converts float16
    prefetch: bool  # waits less for long pieces of memory, as of weights, if it is asked early
    # The same for blocks of a cache, which lie anywhere, as LLVM's locality: 2 is into L2 only, 0
    # into L1 and no further; None: it is not asked.
    block_prefetch: int | None
    bf16_convert: bool  # rounds float32 to bfloat16
    bf16_dot: bool  # multiplies pairs of bfloat16 in less time than it takes to make them float32
    byte_dot: bool  # multiplies bytes and adds up four products in a lane
    float_panels: bool  # multiplies many rows of floats by panels in less time than torch
    amx: bool  # multiplies tiles of 16 x 32 bfloat16

    def without_amx(self) -> "Isa":
        """Return the same CPU without AMX, where the system does not grant its tiles."""
        return replace(self, amx=False)


LANES = 16
LINE_BYTES = 4 * LANES  # of one vector
LOG2_E = 1 / log(2)
LOWEST = -1e30  # a score that weighs nothing; finite, for inf - inf is not a number


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, for which llvmlite has no name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
SHORTS, BYTES = ir.VectorType(I16, LANES), ir.VectorType(I8, LANES)
HALVES = ir.VectorType(F16, LANES)
BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)

_ORDINARY = ("nsz", "contract", "reassoc")  # what may be rearranged; infinities and NaN are kept


class Int:
    """A 64-bit integer of a kernel: an address, a count, or a number of bytes."""

    __slots__ = ("b", "value")

    def __init__(self, builder: ir.IRBuilder, value: Value) -> None:
        self.b = builder
        self.value = value

    def _with(self, made: Value) -> "Int":
        return Int(self.b, made)

    def __add__(self, other: "int | Int") -> "Int":
        return self if _is(other, 0) else self._with(self.b.add(self.value, _word(other)))

    def __sub__(self, other: "int | Int") -> "Int":
        return self._with(self.b.sub(self.value, _word(other)))

    def __mul__(self, other: "int | Int") -> "Int":
        return self if _is(other, 1) else self._with(self.b.mul(self.value, _word(other)))

    def __floordiv__(self, other: "int | Int") -> "Int":
        """Divide numbers that are not negative."""
        return self._with(self.b.udiv(self.value, _word(other)))

    def __mod__(self, other: "int | Int") -> "Int":
        """Take the remainder of numbers that are not negative."""
        return self._with(self.b.urem(self.value, _word(other)))

    __radd__ = __add__
    __rmul__ = __mul__

    def compare(self, how: str, other: "int | Int") -> Value:
        """Compare as signed numbers: ``how`` is LLVM's sign, "<" for one."""
        return self.b.icmp_signed(how, self.value, _word(other))

    def __lt__(self, other: "int | Int") -> Value:
        return self.compare("<", other)

    def __ge__(self, other: "int | Int") -> Value:
        return self.compare(">=", other)

    def equals(self, other: "int | Int") -> Value:
        """Compare for equality; ``==`` itself stays Python's."""
        return self.compare("==", other)

    def at_most(self, other: "int | Int") -> "Int":
        """Take the smaller number."""
        return self._with(self.b.select(self < other, self.value, _word(other)))

    def at_least(self, other: "int | Int") -> "Int":
        """Take the larger number."""
        return self._with(self.b.select(self < other, _word(other), self.value))

    @property
    def int32(self) -> Value:
        return self.b.trunc(self.value, I32)


class Code:
    """The body of one kernel while it is being written."""

    def __init__(self, module: ir.Module, name: str, num_params: int, isa: Isa) -> None:
        signature = ir.FunctionType(ir.VoidType(), [I64] * num_params)
        self.function = ir.Function(module, signature, name)
        self.isa = isa
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.params = [Int(self.b, argument) for argument in self.function.args]

    def end(self) -> None:
        """End the kernel."""
        self.b.ret_void()

    # -- whole numbers and control ---------------------------------------------------------------

    def whole(self, value: int) -> Int:
        """Make a number that is known now."""
        return Int(self.b, ir.Constant(I64, value))

    def loop(
        self,
        count: int | Int,
        carried: Sequence[Value],
        body: Callable[[Int, list[Value]], Sequence[Value]],
        *,
        step: int = 1,
        start: int | Int = 0,
    ) -> list[Value]:
        """Write ``for i in range(start, count, step): carried = body(i, carried)``.

        Return the last of what is carried.
        """
        before = self.b.block
        head, inside, after = (self.b.append_basic_block(n) for n in ("head", "body", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(_word(start), before)
        values = [self.b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, before)
        self.b.cbranch(self.b.icmp_signed("<", i, _word(count)), inside, after)
        self.b.position_at_end(inside)
        results = body(Int(self.b, i), list(values))
        i.add_incoming(self.b.add(i, _word(step)), self.b.block)
        for phi, value in zip(values, results, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)
        return list(values)

    def each(
        self,
        count: int | Int,
        body: Callable[[Int], None],
        *,
        step: int = 1,
        start: int | Int = 0,
    ) -> None:
        """Write ``for i in range(start, count, step): body(i)``."""

        def with_nothing(i: Int, _: list[Value]) -> Sequence[Value]:
            body(i)
            return ()

        self.loop(count, (), with_nothing, step=step, start=start)

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        """Write ``if condition: body()``."""
        with self.b.if_then(condition):
            body()

    def either(
        self, condition: Value, then: Callable[[], None], otherwise: Callable[[], None]
    ) -> None:
        """Write ``if condition: then()`` and ``else: otherwise()``."""
        with self.b.if_else(condition) as (when_true, when_false):
            with when_true:
                then()
            with when_false:
                otherwise()

    def choose(self, condition: Value, a: Int, b: Int) -> Int:
        """Choose a where the condition holds, else b."""
        return Int(self.b, self.b.select(condition, a.value, b.value))

    def forever(self, body: Callable[[], None]) -> None:
        """Write ``while True: body()``, until the body leaves."""
        again, after = (self.b.append_basic_block(n) for n in ("again", "done"))
        self.b.branch(again)
        self.b.position_at_end(again)
        self._after = after
        body()
        self.b.branch(again)
        self.b.position_at_end(after)

    def leave_when(self, condition: Value) -> None:
        """Leave the innermost ``forever``."""
        on = self.b.append_basic_block("on")
        self.b.cbranch(condition, self._after, on)
        self.b.position_at_end(on)

    def run(self, name: str, *arguments: int | Int) -> None:
        """Call another kernel of the same module."""
        self.b.call(self.function.module.globals[name], [_word(a) for a in arguments])

    def take(self, counter: Int, by: int = 1) -> Int:
        """Add to a shared counter at an address; return its number before."""
        pointer = self.pointer(counter)
        return Int(self.b, self.b.atomic_rmw("add", pointer, _word(by), "seq_cst"))

    # -- memory ----------------------------------------------------------------------------------

    def pointer(self, address: Int) -> Value:
        """Turn an address into LLVM's pointer."""
        return self.b.inttoptr(address.value, POINTER)

    def read(self, address: Int, typ: ir.Type) -> Value:
        """Read a value at an address, aligned as one element is."""
        return self.b.load(self.pointer(address), align=_element_bytes(typ), typ=typ)

    def number(self, address: Int) -> Int:
        """Read a 64-bit integer."""
        return Int(self.b, self.read(address, I64))

    def write(self, value: Value, address: Int) -> None:
        """Write a value at an address, aligned as one element is."""
        self.b.store(value, self.pointer(address), align=_element_bytes(value.type))

    def read_part(self, address: Int, element: ir.Type, count: int, lanes: int) -> Value:
        """Read the first ``count`` elements, and zeros: no byte behind them is touched."""
        nbytes = _element_bytes(element)
        zero = ir.Constant(ir.VectorType(element, lanes), [_zero(element)] * lanes)
        if count == lanes:
            return self.read(address, zero.type)
        result, done = zero, 0
        for size in (16, 8, 4, 2, 1):
            if count - done < size:
                continue
            part = self.read(address + done * nbytes, ir.VectorType(element, size))
            placed = self.shuffle(part, part, [max(i - done, 0) % size for i in range(lanes)])
            inside = range(done, done + size)
            result = self.shuffle(
                result, placed, [lanes + i if i in inside else i for i in range(lanes)]
            )
            done += size
        return result

    def load(self, address: Int) -> Value:
        """Read sixteen floats."""
        return self.read(address, FLOATS)

    def prefetch(self, address: Int, nbytes: int) -> None:
        """Ask for ``nbytes`` that are read soon, where the CPU does not see that itself."""
        if self.isa.prefetch:
            # Into L2 only, which keeps the few places for misses of L1 free.
            self._ask(address, nbytes, (0, 2, 1))

    def prefetch_block(self, address: Int, nbytes: int, *, writes: bool = False) -> None:
        """Ask for ``nbytes`` of a cache's block that are needed soon."""
        if self.isa.block_prefetch is not None:
            self._ask(address, nbytes, (1, 3, 1) if writes else (0, self.isa.block_prefetch, 1))

    def _ask(self, address: Int, nbytes: int, how: tuple[int, int, int]) -> None:
        hints = [ir.Constant(I32, hint) for hint in how]
        for n in range(0, nbytes, LINE_BYTES):
            line = self.pointer(address + n)
            self.call("llvm.prefetch.p0", ir.VoidType(), line, *hints)

    def store(self, value: Value, address: Int) -> None:
        """Write sixteen floats."""
        self.write(value, address)

    # -- vectors ---------------------------------------------------------------------------------

    def ints(self, value: int) -> Value:
        """Make a vector of one 32-bit number."""
        return ir.Constant(INTS, [value] * LANES)

    def shorts(self, value: int) -> Value:
        """Make a vector of one 16-bit number."""
        return ir.Constant(SHORTS, [value] * LANES)

    def floats(self, value: float) -> Value:
        """Make a vector of one float."""
        return ir.Constant(FLOATS, [value] * LANES)

    def splat(self, value: Value) -> Value:
        """Put one number into every lane."""
        typ = ir.VectorType(value.type, LANES)
        vector = self.b.insert_element(ir.Constant(typ, ir.Undefined), value, ir.Constant(I32, 0))
        return self.shuffle(vector, vector, [0] * LANES)

    def shuffle(self, a: Value, b: Value, picks: list[int]) -> Value:
        """Put lane ``picks[i]`` of a into lane i; picks beyond a's lanes are of b."""
        mask = ir.Constant(ir.VectorType(I32, len(picks)), picks)
        return self.b.shuffle_vector(a, b, mask)

    def plus(self, a: Value, b: Value) -> Value:
        """Add floats."""
        return self.b.fadd(a, b, flags=_ORDINARY)

    def minus(self, a: Value, b: Value) -> Value:
        """Subtract floats."""
        return self.b.fsub(a, b, flags=_ORDINARY)

    def times(self, a: Value, b: Value) -> Value:
        """Multiply floats."""
        return self.b.fmul(a, b, flags=_ORDINARY)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Compute a * b + c, in one rounding where the CPU can."""
        return self._intrinsic("llvm.fmuladd", a, b, c)

    def max(self, a: Value, b: Value) -> Value:
        """Take the larger floats; b where a is not a number."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def min(self, a: Value, b: Value) -> Value:
        """Take the smaller floats; b where a is not a number."""
        return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

    def largest(self, a: Value) -> Value:
        """Find the largest lane, as a scalar."""
        return self._fold(a, lambda x, y: self.max(x, y))

    def smallest(self, a: Value) -> Value:
        """Find the smallest lane, as a scalar."""
        return self._fold(a, lambda x, y: self.min(x, y))

    def sum(self, a: Value) -> Value:
        """Sum all lanes, as a scalar."""
        return self._fold(a, self.plus)

    def _fold(self, a: Value, join: Callable[[Value, Value], Value]) -> Value:
        width = LANES
        while width > 1:
            width //= 2
            other = self.shuffle(a, a, [width + i for i in range(width)] + [0] * (LANES - width))
            a = join(a, other)
        return self.b.extract_element(a, ir.Constant(I32, 0))

    def largest_magnitude(self, several: list[Value]) -> Value:
        """Find the bits of the largest float of some vectors, all taken without a sign: a scalar.

        As whole numbers they are in the same order, and what is no number comes last.
        """
        largest = self.ints(0)
        for value in several:
            size = self.b.and_(self.b.bitcast(value, INTS), self.ints(0x7FFFFFFF))
            largest = self._larger_int(size, largest)
        return self._fold(largest, self._larger_int)

    def _larger_int(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.icmp_unsigned(">", a, b), a, b)

    def sum_ints(self, a: Value) -> Value:
        """Sum all lanes of whole numbers, as a scalar."""
        return self._fold(a, self.b.add)

    def round(self, a: Value) -> Value:
        """Round to the nearest whole numbers, ties to even."""
        return self._intrinsic("llvm.roundeven", a)

    def total(self, several: list[Value]) -> Value:
        """Sum some vectors, two by two."""
        while len(several) > 1:
            several = [self.plus(a, b) for a, b in zip(several[::2], several[1::2], strict=True)]
        return several[0]

    def any(self, bits: Value) -> Value:
        """Test whether one lane is true."""
        return self.b.icmp_unsigned(
            "!=", self.b.bitcast(bits, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0)
        )

    def lane_numbers(self) -> Value:
        """Make the vector 0, 1, … 15."""
        return ir.Constant(INTS, list(range(LANES)))

    def dot_pairs(self, total: Value, a: Value, b: Value) -> Value:
        """Compute total + a * b over pairs: lane i adds a[2i] * b[2i] + a[2i + 1] * b[2i + 1].

        a and b are sixteen words of two bfloat16 each. Only for a CPU with ``bf16_dot``.
        """
        a, b = self.b.bitcast(a, BFLOATS), self.b.bitcast(b, BFLOATS)
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, a, b)

    def dot_bytes(self, total: Value, a: Value, b: Value) -> Value:
        """Compute total + a * b over four bytes a lane, as 32-bit numbers.

        a's bytes have no sign and b's have one. Only for a CPU with ``byte_dot``.
        """
        return self.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, a, b)

    def look_up(self, table: Value, numbers: Value) -> Value:
        """Take ``table[numbers % 16]`` of sixteen floats. Only with 32 registers of AVX-512."""
        return self.call("llvm.x86.avx512.permvar.sf.512", FLOATS, table, numbers)

    def lane_sums(self, several: list[Value]) -> Value:
        """Sum the lanes of each of 2, 4, 8 or 16 vectors: the sum of the i-th becomes lane i.

        The order of a sum is one that no compiler may change: halves of its lanes are added up.
        """
        width = LANES
        while width > 1:
            width //= 2
            if len(several) == 1:
                several = several * 2
            # Of every 2 · width lanes the first half and the second: of all in a, then in b.
            first = [n + i for n in range(0, 2 * LANES, 2 * width) for i in range(width)]
            second = [lane + width for lane in first]
            several = [
                self.b.fadd(self.shuffle(a, b, first), self.shuffle(a, b, second))
                for a, b in zip(several[::2], several[1::2], strict=True)
            ]
        return several[0]

    def transpose(self, rows: list[Value]) -> list[Value]:
        """Transpose sixteen vectors of sixteen: lane j of the i-th becomes lane i of the j-th."""
        for width in (8, 4, 2, 1):
            swapped = list(rows)
            for i in range(LANES):
                if i & width:
                    continue
                a, b = rows[i], rows[i | width]
                swapped[i] = self.shuffle(
                    a, b, [LANES + (k ^ width) if k & width else k for k in range(LANES)]
                )
                swapped[i | width] = self.shuffle(
                    a, b, [LANES + k if k & width else k ^ width for k in range(LANES)]
                )
            rows = swapped
        return rows

    def _intrinsic(self, name: str, *arguments: Value) -> Value:
        return self.call(f"{name}.v{LANES}f32", FLOATS, *arguments)

    def call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        """Call a function of LLVM or of this module by its name."""
        module = self.function.module
        known = module.globals.get(name)
        if known is None:
            signature = ir.FunctionType(result, [argument.type for argument in arguments])
            known = ir.Function(module, signature, name)
        return self.b.call(known, arguments)


def _word(value: int | Int) -> Value:
    return ir.Constant(I64, value) if isinstance(value, int) else value.value


def _is(value: int | Int, number: int) -> bool:
    return isinstance(value, int) and value == number


def _element_bytes(typ: ir.Type) -> int:
    element = typ.element if isinstance(typ, ir.VectorType) else typ
    return {I8: 1, I16: 2, F16: 2, I64: 8}.get(element, 4)


def _zero(element: ir.Type) -> float | int:
    return 0.0 if element in (F16, F32) else 0


# -- powers of two ---------------------------------------------------------------------------------


def exp2(code: Code, x: Value, degree: int = 6) -> Value:
    """Compute 2 ** x for x ≤ 127: to about 2e-4, 4e-6, 1e-7 for degree 3, 4, 5; to rounding for 6.

    2 ** x = 2 ** n * 2 ** r, n the nearest whole number: a polynomial for r, and n added to the
    exponent's bits.
    """
    x = code.max(code.floats(-126.0), x)  # in this order: what is no number stays none
    n = code.round(x)
    r = code.minus(x, n)
    coefficients = exp2_coefficients(degree)
    result = code.floats(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = code.fma(result, r, code.floats(coefficient))
    exponent = code.b.shl(code.b.fptosi(n, INTS), code.ints(23))
    return code.b.bitcast(code.b.add(code.b.bitcast(result, INTS), exponent), FLOATS)


def exp2_coefficients(degree: int) -> list[float]:
    """Fit 2 ** r for |r| ≤ 1/2: Taylor's polynomial, its last terms spread by Chebyshev."""
    terms = [log(2) ** n / factorial(n) for n in range(degree + 3)]
    # Economize: x ** n is lowered by T_n / 2 ** (n - 1) on [-1/2, 1/2].
    for n in range(degree + 2, degree, -1):
        chebyshev = _chebyshev(n)
        scale = terms[n] / (chebyshev[n] * 2.0**n)
        for power in range(n + 1):
            terms[power] -= scale * chebyshev[power] * 2.0**power
    return terms[: degree + 1]


def _chebyshev(n: int) -> list[int]:
    """Compute the coefficients of T_n."""
    before, now = [1], [0, 1]
    for _ in range(n - 1):
        doubled = [0, *(2 * c for c in now)]
        before, now = now, [c - d for c, d in zip(doubled, [*before, 0, 0], strict=False)]
    return now
