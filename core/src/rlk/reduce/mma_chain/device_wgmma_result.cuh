// SPDX-License-Identifier: Apache-2.0
// From a warpgroup's accumulators to the result and back: where chains start, and how they end.
// wgmma gives a thread rows (lane / 4) and 8 further of its warp's 16, and of every 8 columns two
// neighbours; acc[4 j + 2 h] and the next are block j of columns, half h of rows.
#pragma once
#include "rlk/reduce/mma_chain/device_wgmma.cuh"

namespace rlk {

// A product as the kernel sees it: if swapped, a and b have changed places, and so have the strides.
struct WgmmaCall {
    void* out;
    const void* bias;
    const float* initial;
    long long M, N, K;
    long long out_stride_m, out_stride_n, initial_stride_m, initial_stride_n, bias_stride;
    int bias_dtype, out_dtype;
    bool bias_of_rows;  // swapped
    bool wide;          // 16 bytes of neighbouring columns of the result may be written at once
    int group;          // clusters of rows that go through the columns together
    WgmmaParts a_parts, b_parts;
};

// An element of the bias as it lies in memory: a conversion would wait for the load.
__device__ __forceinline__ uint32_t load_bias(const WgmmaCall& p, long long at) {
    if (p.bias_dtype == kFloat32) return static_cast<const uint32_t*>(p.bias)[at * p.bias_stride];
    return static_cast<const uint16_t*>(p.bias)[at * p.bias_stride];
}

__device__ __forceinline__ float bias_value(const WgmmaCall& p, uint32_t bits) {
    if (p.bias_dtype == kFloat32) return __uint_as_float(bits);
    if (p.bias_dtype == kBFloat16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half((unsigned short)bits));
}

template <typename T> __device__ __forceinline__ uint32_t pack(float x, float y);
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float x, float y) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&two);
}
template <> __device__ __forceinline__ uint32_t pack<__half>(float x, float y) {
    const __half2 two = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&two);
}

// The accumulators before the first step: `row` is the first of this warp.
template <int MI, int BN>
__device__ __forceinline__ void start_chains(const WgmmaCall& p, long long row, long long column,
                                             float (&acc)[MI][BN / 2]) {
    const int lane = threadIdx.x & 31, first = 2 * (lane & 3);
    const int left = (int)min(p.N - column, (long long)BN) - first;
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long m = row + i * WGMMA_ROWS + (lane >> 2) + 8 * h;
            const float* at =
                p.initial + m * p.initial_stride_m + (column + first) * p.initial_stride_n;
            const int here = m < p.M ? left : 0;
#pragma unroll
            for (int j = 0; j < BN / 8; ++j, at += 8 * p.initial_stride_n) {
                acc[i][4 * j + 2 * h] = j * 8 < here ? at[0] : 0.0f;
                acc[i][4 * j + 2 * h + 1] = j * 8 + 1 < here ? at[p.initial_stride_n] : 0.0f;
            }
        }
    }
}

// To add it changes no bit of what `finish` gives: a bias is of columns or of rows.
constexpr float NO_BIAS = -0.0f;

// A row of the bias for the columns of a tile: loaded before the chain, so that nobody waits for it
// after, and shared by the warpgroup then.
template <int BN> struct ColumnBias {
    static constexpr int PER_THREAD = (BN + WARPGROUP - 1) / WARPGROUP;
    uint32_t bits[PER_THREAD];

    __device__ __forceinline__ void load(const WgmmaCall& p, long long column) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int at = threadIdx.x % WARPGROUP + WARPGROUP * i;
            const bool here = !p.bias_of_rows && at < BN && column + at < p.N;
            bits[i] = here ? load_bias(p, column + at) : 0u;
        }
    }
    __device__ __forceinline__ void share(const WgmmaCall& p, float* shared) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int at = threadIdx.x % WARPGROUP + WARPGROUP * i;
            if (at < BN) shared[at] = p.bias_of_rows ? NO_BIAS : bias_value(p, bits[i]);
        }
    }
};

// What comes after the last step. `columns` is in shared memory.
template <int MI, bool BIAS> struct Ending {
    const float* columns;
    float rows[MI][2];

    __device__ __forceinline__ Ending(const WgmmaCall& p, const float* columns, long long row)
        : columns(columns) {
#pragma unroll
        for (int i = 0; BIAS && i < MI; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const long long m = row + i * WGMMA_ROWS + ((threadIdx.x & 31) >> 2) + 8 * h;
                const bool here = p.bias_of_rows && m < p.M;
                rows[i][h] = here ? bias_value(p, load_bias(p, m)) : NO_BIAS;
            }
        }
    }
    // The two elements of accumulator i in block j of columns and half h of rows.
    // ORDER: the chain, then +0, then the bias.
    template <int SIZE>
    __device__ __forceinline__ float2 pair(const float (&acc)[MI][SIZE], int i, int j,
                                           int h) const {
        float2 c = {finish(acc[i][4 * j + 2 * h]), finish(acc[i][4 * j + 2 * h + 1])};
        if constexpr (BIAS) {
            const int at = j * MMA_COLUMNS + 2 * (threadIdx.x & 3);
            const float2 bias = *reinterpret_cast<const float2*>(columns + at);
            c = {__fadd_rn(__fadd_rn(c.x, bias.x), rows[i][h]),
                 __fadd_rn(__fadd_rn(c.y, bias.y), rows[i][h])};
        }
        return c;
    }
};

// Any strides: neighbouring lanes along the shorter one. A function of its own: seldom called.
template <typename V, int COLUMNS, int PITCH>
__device__ __noinline__ void copy_elements(const WgmmaCall& p, const unsigned char* buffer, V* out,
                                           int rows, int columns) {
    const bool along_rows = p.out_stride_m < p.out_stride_n;
    for (int e = threadIdx.x & 31; e < MMA_ROWS * COLUMNS; e += 32) {
        const int r = along_rows ? e % MMA_ROWS : e / COLUMNS;
        const int c = along_rows ? e / MMA_ROWS : e % COLUMNS;
        if (r >= rows || c >= columns) continue;
        out[r * p.out_stride_m + c * p.out_stride_n] =
            *reinterpret_cast<const V*>(buffer + r * PITCH + c * (int)sizeof(V));
    }
}

// 16 rows of COLUMNS values in a warp's buffer to the result from (row, column) on.
template <typename V, int COLUMNS, int PITCH>
__device__ __forceinline__ void copy_out(const WgmmaCall& p, const unsigned char* buffer,
                                         long long row, long long column) {
    const int lane = threadIdx.x & 31;
    const int rows = clamped(p.M - row, MMA_ROWS), columns = clamped(p.N - column, COLUMNS);
    V* out = static_cast<V*>(p.out) + row * p.out_stride_m + column * p.out_stride_n;
    constexpr int PER_WORD = 16 / (int)sizeof(V), WORDS = COLUMNS / PER_WORD;
    const auto copy = [&](V* to, int r, int c) {
        *reinterpret_cast<uint4*>(to) =
            *reinterpret_cast<const uint4*>(buffer + r * PITCH + c * (int)sizeof(V));
    };
    if (!p.wide || columns != COLUMNS) {
        copy_elements<V, COLUMNS, PITCH>(p, buffer, out, rows, columns);
    } else if (32 % WORDS == 0 && rows == MMA_ROWS) {
        constexpr int STEP = 32 / WORDS;
        const int r = lane / WORDS, c = lane % WORDS * PER_WORD;
        V* to = out + r * p.out_stride_m + c;
#pragma unroll
        for (int i = 0; i < MMA_ROWS / STEP; ++i, to += STEP * p.out_stride_m) {
            copy(to, r + i * STEP, c);
        }
    } else {
#pragma unroll
        for (int i = 0; i < (MMA_ROWS * WORDS + 31) / 32; ++i) {
            const int r = (i * 32 + lane) / WORDS, c = (i * 32 + lane) % WORDS * PER_WORD;
            if (r < rows) copy(out + r * p.out_stride_m + c, r, c);
        }
    }
}

// 16 rows of a warp at a time go through shared memory, so that its lanes write what lies side by
// side. 16 bytes of padding: no two rows begin in the same bank.
template <int BN> struct Outgoing {
    static constexpr int BYTES_A_ROW =
        2 * (BN % 64 == 0 ? 64 : (BN % 48 == 0 ? 48 : (BN % 32 == 0 ? 32 : 16)));
    static constexpr int PITCH = BYTES_A_ROW + 16;
    static constexpr int BYTES = MMA_ROWS * PITCH;
};

// Rounded once to T.
template <typename T, int MI, int BN, typename End>
__device__ __forceinline__ void store_narrow(const WgmmaCall& p, const float (&acc)[MI][BN / 2],
                                             const End& ending, unsigned char* buffer,
                                             long long row, long long column) {
    constexpr int PITCH = Outgoing<BN>::PITCH, COLUMNS = Outgoing<BN>::BYTES_A_ROW / 2;
    const int lane = threadIdx.x & 31;
    const uint32_t at = shared_address(buffer) + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int first = 0; first < BN; first += COLUMNS) {
#pragma unroll
            for (int j = 0; j < COLUMNS / MMA_COLUMNS; j += 2) {
                uint32_t two[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const float2 c =
                        ending.pair(acc, i, first / MMA_COLUMNS + j + q / 2, q & 1);
                    two[q] = pack<T>(c.x, c.y);
                }
                asm volatile(
                    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                        at + j * 16),
                    "r"(two[0]), "r"(two[1]), "r"(two[2]), "r"(two[3])
                    : "memory");
            }
            __syncwarp();
            copy_out<T, COLUMNS, PITCH>(p, buffer, row + i * WGMMA_ROWS, column + first);
            __syncwarp();
        }
    }
}

template <int MI, int BN, typename End>
__device__ __forceinline__ void store_fp32(const WgmmaCall& p, const float (&acc)[MI][BN / 2],
                                           const End& ending, unsigned char* buffer,
                                           long long row, long long column) {
    constexpr int PITCH = Outgoing<BN>::PITCH, COLUMNS = Outgoing<BN>::BYTES_A_ROW / 4;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int first = 0; first < BN; first += COLUMNS) {
#pragma unroll
            for (int j = 0; j < COLUMNS / MMA_COLUMNS; ++j) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int at = ((lane >> 2) + 8 * h) * PITCH + j * 32 + (lane & 3) * 8;
                    *reinterpret_cast<float2*>(buffer + at) =
                        ending.pair(acc, i, first / MMA_COLUMNS + j, h);
                }
            }
            __syncwarp();
            copy_out<float, COLUMNS, PITCH>(p, buffer, row + i * WGMMA_ROWS, column + first);
            __syncwarp();
        }
    }
}

template <typename T, int MI, int BN, typename End>
__device__ __forceinline__ void store(const WgmmaCall& p, const float (&acc)[MI][BN / 2],
                                      const End& ending, unsigned char* buffer, long long row,
                                      long long column) {
    if (p.out_dtype == kFloat32) store_fp32<MI, BN>(p, acc, ending, buffer, row, column);
    else store_narrow<T, MI, BN>(p, acc, ending, buffer, row, column);
}

}  // namespace rlk
