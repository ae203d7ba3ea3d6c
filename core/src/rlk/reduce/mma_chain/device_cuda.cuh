// SPDX-License-Identifier: Apache-2.0
// Steps of the MMA chain in CUDA, under the names of device_triton.py: tiles in shared memory, and
// blocks of K that warps add to their accumulators. The order is that of mma_chain.product.
#pragma once
#include "rlk/cuda/rows.cuh"

namespace rlk {

// 16: rows of one MMA; 8: its columns; 16 and 8: of K, for BF16 or FP16 and for FP32.
constexpr int MMA_ROWS = 16;
constexpr int MMA_COLUMNS = 8;
constexpr int MMA_K = 16;
constexpr int MMA_K_FP32 = 8;

// What is left of a size, from 0 to `most`.
__device__ __forceinline__ int clamped(long long value, int most) {
    return value < 0 ? 0 : (value < most ? (int)value : most);
}

// Rows of WIDTH elements in shared memory. Their chunks of 16 bytes change places from row to row,
// so that eight rows of the same chunk lie in different banks.
template <typename T, int WIDTH> struct SharedRows {
    static constexpr int PER_CHUNK = 16 / (int)sizeof(T);
    static constexpr int CHUNKS = WIDTH / PER_CHUNK;

    static __device__ __forceinline__ int at(int row, int column) {
        const int turn = CHUNKS >= 8 ? row & 7 : (row / (8 / CHUNKS)) & (CHUNKS - 1);
        return row * WIDTH + ((column / PER_CHUNK) ^ turn) * PER_CHUNK + column % PER_CHUNK;
    }
};

// An operand's tile of ROWS by BK: [ROWS][BK] if K_MAJOR, else [BK][ROWS].
template <typename T, int ROWS, int BK, bool K_MAJOR> struct SharedTile {
    static constexpr int SIZE = ROWS * BK;
    static __device__ __forceinline__ int at(int row, int k) {
        return K_MAJOR ? SharedRows<T, BK>::at(row, k) : SharedRows<T, ROWS>::at(k, row);
    }
};

__device__ __forceinline__ uint32_t shared_address(const void* at) {
    return (uint32_t)__cvta_generic_to_shared(at);
}

// 16 bytes of elements of which the first `count` are read and the others are zero.
template <typename T>
__device__ __forceinline__ void copy_chunk(T* to, const T* from, int count) {
    constexpr int PER_CHUNK = 16 / (int)sizeof(T);
    if (count == PER_CHUNK) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
                     "l"(from)
                     : "memory");
        return;
    }
    // Not by a copy of fewer bytes: its instruction spans all 16, beyond the end of the tensor.
    struct alignas(16) Chunk {
        T value[PER_CHUNK];
    } chunk;
#pragma unroll
    for (int i = 0; i < PER_CHUNK; ++i) chunk.value[i] = i < count ? from[i] : from_float<T>(0.0f);
    *reinterpret_cast<Chunk*>(to) = chunk;
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most PENDING groups of this thread's copies are on their way.
template <int PENDING> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices, at the rows that the lanes point to.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(const void* at, uint32_t (&out)[4]) {
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(shared_address(at))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(shared_address(at))
                     : "memory");
    }
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(const void* at, uint32_t (&out)[2]) {
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(out[0]), "=r"(out[1])
                     : "r"(shared_address(at))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(out[0]), "=r"(out[1])
                     : "r"(shared_address(at))
                     : "memory");
    }
}

// One step of the chain: acc [16, 8] += a [16, K] b [K, 8].
__device__ __forceinline__ void mma_step(__nv_bfloat16, const uint32_t (&a)[4],
                                         const uint32_t (&b)[2], float (&acc)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_step(__half, const uint32_t (&a)[4], const uint32_t (&b)[2],
                                         float (&acc)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_step(float, const uint32_t (&a)[4], const uint32_t (&b)[2],
                                         float (&acc)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The bits of a finite FP32 number, its fraction to nearest even in 10 bits.
__device__ __forceinline__ uint32_t round_tf32(uint32_t bits) {
    return (bits + 0xfffu + ((bits >> 13) & 1u)) & 0xffffe000u;
}

enum class Part { HI, LO };

// One of the TF32 numbers of which FP32 is the sum; Inf and NaN stand in LO alone.
template <Part PART> __device__ __forceinline__ uint32_t split_tf32(float x) {
    const uint32_t bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    const bool special = size >= 0x7f800000u;
    // The largest TF32 number instead of Inf.
    const uint32_t hi = special ? 0u : min(round_tf32(size), 0x7f7fe000u) | (bits ^ size);
    if (PART == Part::HI) return hi;
    // The low bits of a NaN are not read by the tensor core: its high ones must say NaN.
    if (special) return size > 0x7f800000u ? 0x7fc00000u : bits;
    return round_tf32(__float_as_uint(__fsub_rn(x, __uint_as_float(hi))));  // x - hi is exact
}

// What a warp holds of one step: its rows of a and its columns of b.
template <int TILES_M, int TILES_N> struct Fragments {
    uint32_t a[TILES_M][4];
    uint32_t b[TILES_N][2];
};

// Fragments of BF16 or FP16 at `k`, the rows of a from `row` on, the columns of b from `column` on.
template <typename T, typename TileA, typename TileB, bool A_K_MAJOR, bool B_K_MAJOR, int TILES_M,
          int TILES_N>
__device__ __forceinline__ void load_step(const T* a, const T* b, int row, int column, int k,
                                          Fragments<TILES_M, TILES_N>& out) {
    const int lane = threadIdx.x & 31, upper = lane >> 4, middle = (lane >> 3) & 1;
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        const int first = row + i * MMA_ROWS;
        const int at = A_K_MAJOR ? TileA::at(first + (lane & 15), k + 8 * upper)
                                 : TileA::at(first + 8 * middle, k + (lane & 7) + 8 * upper);
        load_matrices<!A_K_MAJOR>(a + at, out.a[i]);
    }
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) {
        const int first = column + j * MMA_COLUMNS;
        const int at = B_K_MAJOR ? TileB::at(first + (lane & 7), k + 8 * middle)
                                 : TileB::at(first, k + (lane & 15));
        load_matrices<!B_K_MAJOR>(b + at, out.b[j]);
    }
}

// The same of one part of FP32.
template <Part PART_A, Part PART_B, typename TileA, typename TileB, int TILES_M, int TILES_N>
__device__ __forceinline__ void load_parts(const float* a, const float* b, int row, int column,
                                           int k, Fragments<TILES_M, TILES_N>& out) {
    const int lane = threadIdx.x & 31, group = lane >> 2, place = lane & 3;
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at_row = row + i * MMA_ROWS + group + 8 * (e & 1);
            out.a[i][e] = split_tf32<PART_A>(a[TileA::at(at_row, k + place + 4 * (e >> 1))]);
        }
    }
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int at_column = column + j * MMA_COLUMNS + group;
            out.b[j][e] = split_tf32<PART_B>(b[TileB::at(at_column, k + place + 4 * e)]);
        }
    }
}

template <int TILES_M, int TILES_N>
__device__ __forceinline__ void add_block(const float (&block)[TILES_M][TILES_N][4],
                                          float (&acc)[TILES_M][TILES_N][4]) {
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][j][e] = __fadd_rn(acc[i][j][e], block[i][j][e]);
        }
    }
}

template <typename T, int TILES_M, int TILES_N>
__device__ __forceinline__ void mma_steps(const Fragments<TILES_M, TILES_N>& in,
                                          float (&acc)[TILES_M][TILES_N][4]) {
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) mma_step(T(), in.a[i], in.b[j], acc[i][j]);
    }
}

template <Part PART_A, Part PART_B, typename TileA, typename TileB, int BK, int TILES_M,
          int TILES_N>
__device__ __forceinline__ void mma_parts(const float* a, const float* b, int row, int column,
                                          float (&acc)[TILES_M][TILES_N][4]) {
    // 1: side by side the steps take more registers than there are beside two accumulators.
#pragma unroll 1
    for (int k = 0; k < BK; k += MMA_K_FP32) {
        Fragments<TILES_M, TILES_N> fragments;
        load_parts<PART_A, PART_B, TileA, TileB>(a, b, row, column, k, fragments);
        mma_steps<float>(fragments, acc);
    }
}

// The chains of a warp continued over one block of K.
template <typename T, typename TileA, typename TileB, bool A_K_MAJOR, bool B_K_MAJOR, int BK,
          int TILES_M, int TILES_N>
__device__ __forceinline__ void mma_block(const T* a, const T* b, int row, int column,
                                          float (&acc)[TILES_M][TILES_N][4]) {
    if constexpr (sizeof(T) == 4) {
        // ORDER: within 32 of K all lo * hi, then all hi * lo, then all hi * hi; then one addition.
        static_assert(BK == 32, "part of the order");
        float block[TILES_M][TILES_N][4] = {};
        mma_parts<Part::LO, Part::HI, TileA, TileB, BK>(a, b, row, column, block);
        mma_parts<Part::HI, Part::LO, TileA, TileB, BK>(a, b, row, column, block);
        mma_parts<Part::HI, Part::HI, TileA, TileB, BK>(a, b, row, column, block);
        add_block(block, acc);
    } else {
#pragma unroll
        for (int k = 0; k < BK; k += MMA_K) {
            Fragments<TILES_M, TILES_N> fragments;
            load_step<T, TileA, TileB, A_K_MAJOR, B_K_MAJOR>(a, b, row, column, k, fragments);
            mma_steps<T>(fragments, acc);
        }
    }
}

// The chain after its last step: idle steps of zeros change at most the sign of a zero.
__device__ __forceinline__ float finish(float acc) { return __fadd_rn(acc, 0.0f); }

}  // namespace rlk
