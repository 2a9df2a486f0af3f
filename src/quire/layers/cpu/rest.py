"""The last inputs of a row, where they fill no vector: copied to where zeros are behind them."""

from llvmlite import ir

from quire.kernels.language import I8, I16, I32, LINE_BYTES, Code, Int


def copy_rest(code: Code, element_bytes: int, source: Int, count: Int, target: Int) -> None:
    """``count`` elements, and zeros up to a whole line."""
    typ = {4: I32, 2: I16}[element_bytes]
    code.write(ir.Constant(ir.VectorType(I8, LINE_BYTES), [0] * LINE_BYTES), target)
    code.each(
        count * element_bytes,
        lambda n: code.write(code.read(source + n, typ), target + n),
        step=element_bytes,
    )
