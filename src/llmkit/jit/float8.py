"""8-bit floating-point numbers in Triton kernels. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def widened(x: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Numbers x in the type WIDE, exactly, where x is float8 (e4m3) and WIDE has room for it; else `x.to(WIDE)`.

    To bfloat16 bits are moved, as the processor's own conversion is several times slower on Hopper: with sign, exponent
    and mantissa in their places only the exponent's offset is missing, which a product with 2**120 makes up for, also
    for numbers without a leading 1. The two codes of NaN become 480 and -480.
    """
    if x.dtype == tl.float8e4nv and WIDE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0;
            and.b32 d, d, 0x07f007f0;
            lop3.b32 a, a, 0x80008000, c, 0xEA;
            lop3.b32 b, b, 0x80008000, d, 0xEA;
            mov.b32 c, 0x7B807B80;
            mov.b32 d, 0x80008000;
            fma.rn.bf16x2 $0, a, c, d;
            fma.rn.bf16x2 $1, b, c, d;
            }
            """,
            "=r,=r,r",
            [x.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return x.to(WIDE)
