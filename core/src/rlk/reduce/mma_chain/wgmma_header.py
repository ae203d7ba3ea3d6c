# SPDX-License-Identifier: Apache-2.0
"""The generated header of kernel_wgmma.cuh: its kernels, as tiles.py lists them, and wgmma."""

from collections.abc import Iterable

from rlk.reduce.mma_chain.tiles import WGMMA_KERNELS, WgmmaKernel

HEADER = "rlk_mma_chain_wgmma.h"
# C++ type -> its name in PTX.
_TYPES = {"__nv_bfloat16": "bf16", "__half": "f16"}


def header(kernels: Iterable[WgmmaKernel] = WGMMA_KERNELS) -> str:
    """The text: X(number, arguments of WgmmaShape) for each kernel, one wgmma for each width."""
    kernels = tuple(kernels)
    rows = [f"    X({', '.join(_words(n, one))}) \\" for n, one in enumerate(kernels)]
    widths = sorted({one.n for one in kernels})
    return "\n".join(
        [
            "// SPDX-License-Identifier: Apache-2.0",
            "// Generated from tiles.py.",
            "#pragma once",
            "#include <cuda_bf16.h>",
            "#include <cuda_fp16.h>",
            "#include <stdint.h>",
            "",
            "#define RLK_MMA_CHAIN_WGMMA(X) \\",
            *rows,
            "",
            "namespace rlk {",
            "template <typename T, int N, bool A_K, bool B_K> struct Wgmma;",
            *(_step(name, n) for name in _TYPES for n in widths),
            "}  // namespace rlk",
            "",
        ]
    )


def _words(number: int, kernel: WgmmaKernel) -> list[str]:
    """Each number or flag as C++ writes it."""
    values = (number, *kernel.reads, *kernel[1:5], kernel.turns, *kernel.cluster)
    return [str(value).lower() for value in values]


def _step(name: str, n: int) -> str:
    """acc [64, n] = a [64, 16] b [16, n], plus acc if `add`; one step of the chain."""
    count = n // 2  # accumulators of a thread
    held = ", ".join(f"%{i}" for i in range(count))
    given = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    kind = _TYPES[name]
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    # The ones: neither operand is negated. The last two: whether one has its rows contiguous.
    operands = f"{{{held}}}, %{count}, %{count + 1}, more, 1, 1, %{count + 3}, %{count + 4}"
    return f"""\
template <bool A_K, bool B_K> struct Wgmma<{name}, {n}, A_K, B_K> {{
    static __device__ __forceinline__ void step(float (&acc)[{count}], uint64_t a, uint64_t b,
                                                int add) {{
        asm volatile("{{\\n.reg .pred more;\\nsetp.ne.b32 more, %{count + 2}, 0;\\n"
            "{opcode} {operands};\\n}}"
            : {given}
            : "l"(a), "l"(b), "r"(add), "n"(A_K ? 0 : 1), "n"(B_K ? 0 : 1));
    }}
}};"""
