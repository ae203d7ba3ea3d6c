# SPDX-License-Identifier: Apache-2.0
"""Another library's gated norm in our words: its operations, tile and warps, by our Triton.

Source: rmsnorm_fn of vllm-project/vllm at 029329a8eded26d05ef8d4a302a6c9f318817dd8,
vllm/model_executor/layers/fla/ops/layernorm_guard.py.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def norm_then_gate_kernel(
    y, x, gate, weight, rows, eps,
    n: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    place = row[:, None] * n + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(values * values, axis=1) / n + eps)
    factor = tl.load(weight + column, mask=column < n, other=0.0).to(tl.float32)
    normed = values * rstd[:, None] * factor[None, :]
    gates = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, normed * (gates * tl.sigmoid(gates)), mask=inside)


def norm_then_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """y [T, N] of contiguous rows: x * rstd * weight * silu(gate), forward alone."""
    rows, n = x.shape
    y = torch.empty_like(x)
    columns = triton.next_power_of_2(n)
    # Theirs: up to 4 rows of a program, by how many there are for each processor of the GPU.
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    of_program = min(4, triton.next_power_of_2(triton.cdiv(rows, 2 * processors)))
    # Warps decide in which order a tile is summed.
    warps = min(8, max(1, columns // 256))
    norm_then_gate_kernel[(triton.cdiv(rows, of_program),)](
        y, x, gate, weight, rows, eps, n, COLUMNS=columns, ROWS=of_program, num_warps=warps
    )
    return y
