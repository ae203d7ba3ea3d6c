// SPDX-License-Identifier: Apache-2.0
// The product of mma_chain in CUDA: blocks of the result, K in stages through shared memory, by
// mma.sync on every GPU. launch_wgmma.cuh has what only Hopper can do.
#include "rlk_mma_chain.h"

#include "rlk/reduce/mma_chain/device_cuda.cuh"
#include "rlk/reduce/mma_chain/launch_wgmma.cuh"

namespace rlk {
namespace {

// How a tile of an operand gets to shared memory: by 16-byte copies along K, by such copies along
// its rows, or element by element, whatever the strides and the alignment.
enum class Reading { ALONG_K, ALONG_ROWS, ELEMENTS };

// An operand [rows, K]; strides in elements.
template <typename T> struct Operand {
    const T* data;
    long long rows, row_stride, k_stride;
};

// 8 rows of tiles go through the columns together, so that tiles of b stay in the L2 cache.
constexpr int GROUP = 8;

// Sizes of a block of the result and of the stages of K; the table in tiles.py has their reasons.
template <typename T, int BM_, int BN_, int WARPS_M_, int WARPS_N_, int STAGES_> struct Shape {
    static constexpr int BM = BM_, BN = BN_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_;
    static constexpr int STAGES = STAGES_;
    // 32 is part of FP32's order. A row of 64 narrow elements is 128 bytes, all the banks; a tile
    // of few rows needs more of K on its way.
    static constexpr int BK = sizeof(T) == 4 ? 32 : (BM == MMA_ROWS ? 128 : 64);
    static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
    static constexpr int TILES_M = BM / WARPS_M / MMA_ROWS;
    static constexpr int TILES_N = BN / WARPS_N / MMA_COLUMNS;
    static constexpr int SHARED = STAGES * (BM + BN) * BK * (int)sizeof(T);
};

// A tile of an operand from (first_row, first_k) on; what lies outside is zero.
template <typename T, Reading READING, int ROWS, int BK, int THREADS>
__device__ __forceinline__ void load_tile(T* shared, const Operand<T>& from, long long first_row,
                                          long long first_k, long long K) {
    constexpr int PER_CHUNK = 16 / (int)sizeof(T);
    using Tile = SharedTile<T, ROWS, BK, READING != Reading::ALONG_ROWS>;
    if constexpr (READING == Reading::ELEMENTS) {
        // Neighbouring threads read along the shorter stride.
        const bool along_k = from.k_stride <= from.row_stride;
        for (int i = threadIdx.x; i < ROWS * BK; i += THREADS) {
            const int row = along_k ? i / BK : i % ROWS, k = along_k ? i % BK : i / ROWS;
            const bool inside = first_row + row < from.rows && first_k + k < K;
            const long long at =
                (first_row + row) * from.row_stride + (first_k + k) * from.k_stride;
            shared[Tile::at(row, k)] = inside ? from.data[at] : from_float<T>(0.0f);
        }
    } else {
        constexpr bool ALONG_K = READING == Reading::ALONG_K;
        constexpr int CHUNKS = (ALONG_K ? BK : ROWS) / PER_CHUNK;
        const long long rows_left = from.rows - first_row, k_left = K - first_k;
        const auto copy = [&](int i, auto count_of) {
            const int outer = i / CHUNKS, inner = i % CHUNKS * PER_CHUNK;
            const int row = ALONG_K ? outer : inner, k = ALONG_K ? inner : outer;
            const T* at =
                from.data + (first_row + row) * from.row_stride + (first_k + k) * from.k_stride;
            copy_chunk(shared + Tile::at(row, k), at, count_of(row, k));
        };
        if (rows_left >= ROWS && k_left >= BK) {
            for (int i = threadIdx.x; i < ROWS * BK / PER_CHUNK; i += THREADS) {
                copy(i, [](int, int) { return PER_CHUNK; });
            }
            return;
        }
        // At an edge a loop, not its turns side by side: they would take registers from all tiles.
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * BK / PER_CHUNK; i += THREADS) {
            copy(i, [&](int row, int k) {
                if (rows_left <= row || k_left <= k) return 0;
                return clamped(ALONG_K ? k_left - k : rows_left - row, PER_CHUNK);
            });
        }
    }
}

__device__ __forceinline__ float load_as_float(const void* data, int dtype, long long at) {
    if (dtype == kBFloat16) return to_float(static_cast<const __nv_bfloat16*>(data)[at]);
    if (dtype == kFloat16) return to_float(static_cast<const __half*>(data)[at]);
    return static_cast<const float*>(data)[at];
}

// One or two neighbours of a row, rounded once.
template <typename T>
__device__ __forceinline__ void store_pair(void* out, long long at, const float (&c)[2], int count,
                                           bool together) {
    T* to = static_cast<T*>(out) + at;
    if (together && count == 2) {
        struct alignas(2 * sizeof(T)) Pair {
            T value[2];
        };
        *reinterpret_cast<Pair*>(to) = {{from_float<T>(c[0]), from_float<T>(c[1])}};
    } else {
        for (int i = 0; i < count; ++i) to[i] = from_float<T>(c[i]);
    }
}

// Where a lane's accumulators lie: rows row and row + 8, columns column and column + 1.
template <typename Function, int TILES_M, int TILES_N>
__device__ __forceinline__ void for_each_pair(const MmaChainProduct& p, long long first_row,
                                              long long first_column,
                                              float (&acc)[TILES_M][TILES_N][4],
                                              Function function) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const long long row = first_row + i * MMA_ROWS + (lane >> 2) + 8 * half;
                const long long column = first_column + j * MMA_COLUMNS + 2 * (lane & 3);
                const int count = row < p.M ? clamped(p.N - column, 2) : 0;
                function(row, column, count, &acc[i][j][2 * half]);
            }
        }
    }
}

template <int TILES_M, int TILES_N>
__device__ __forceinline__ void start_chains(const MmaChainProduct& p, long long row,
                                             long long column,
                                             float (&acc)[TILES_M][TILES_N][4]) {
    for_each_pair(p, row, column, acc, [&](long long m, long long n, int count, float* pair) {
        const float* initial = static_cast<const float*>(p.initial);
        for (int i = 0; i < 2; ++i) {
            const long long at = m * p.initial_stride_m + (n + i) * p.initial_stride_n;
            pair[i] = initial != nullptr && i < count ? initial[at] : 0.0f;
        }
    });
}

template <int TILES_M, int TILES_N>
__device__ __forceinline__ void store_chains(const MmaChainProduct& p, long long row,
                                             long long column,
                                             float (&acc)[TILES_M][TILES_N][4]) {
    const bool together = p.N % 2 == 0;
    for_each_pair(p, row, column, acc, [&](long long m, long long n, int count, float* pair) {
        float c[2];
        for (int i = 0; i < 2; ++i) {
            c[i] = finish(pair[i]);
            if (p.bias != nullptr && i < count) {
                const float bias = load_as_float(p.bias, p.bias_dtype, (n + i) * p.bias_stride);
                c[i] = __fadd_rn(c[i], bias);
            }
        }
        const long long at = m * p.N + n;
        if (p.out_dtype == kFloat32) store_pair<float>(p.out, at, c, count, together);
        if (p.out_dtype == kBFloat16) store_pair<__nv_bfloat16>(p.out, at, c, count, together);
        if (p.out_dtype == kFloat16) store_pair<__half>(p.out, at, c, count, together);
    });
}

template <typename T, typename S, Reading READ_A, Reading READ_B>
__global__ void __launch_bounds__(S::THREADS)
    chain(MmaChainProduct p, Operand<T> a, Operand<T> b) {
    constexpr bool A_K_MAJOR = READ_A != Reading::ALONG_ROWS;
    constexpr bool B_K_MAJOR = READ_B != Reading::ALONG_ROWS;
    using TileA = SharedTile<T, S::BM, S::BK, A_K_MAJOR>;
    using TileB = SharedTile<T, S::BN, S::BK, B_K_MAJOR>;
    extern __shared__ __align__(128) char shared[];
    T* tiles_a = reinterpret_cast<T*>(shared);
    T* tiles_b = tiles_a + S::STAGES * TileA::SIZE;

    // Row and column of the block, in groups of rows.
    const long long tiles_m = (p.M + S::BM - 1) / S::BM, tiles_n = (p.N + S::BN - 1) / S::BN;
    const long long group = blockIdx.x / (GROUP * tiles_n), rest = blockIdx.x % (GROUP * tiles_n);
    const long long height = tiles_m - group * GROUP < GROUP ? tiles_m - group * GROUP : GROUP;
    const long long first_row = (group * GROUP + rest % height) * S::BM;
    const long long first_column = rest / height * S::BN;

    const long long steps = (p.K + S::BK - 1) / S::BK;
    const auto load = [&](long long step) {
        const int stage = (int)(step % S::STAGES);
        if (step < steps) {
            load_tile<T, READ_A, S::BM, S::BK, S::THREADS>(tiles_a + stage * TileA::SIZE, a,
                                                           first_row, step * S::BK, p.K);
            load_tile<T, READ_B, S::BN, S::BK, S::THREADS>(tiles_b + stage * TileB::SIZE, b,
                                                           first_column, step * S::BK, p.K);
        }
        // A group at every step, even an empty one: the waits count groups.
        commit_copies();
    };

    const int warp = threadIdx.x / 32;
    const int row = warp / S::WARPS_N * S::TILES_M * MMA_ROWS;
    const int column = warp % S::WARPS_N * S::TILES_N * MMA_COLUMNS;
    float acc[S::TILES_M][S::TILES_N][4];
    start_chains(p, first_row + row, first_column + column, acc);

    for (int step = 0; step < S::STAGES - 1; ++step) load(step);
    // ORDER: ascending K, one chain from start_chains to store_chains.
    for (long long step = 0; step < steps; ++step) {
        wait_copies<S::STAGES - 2>();
        // Also: every warp is done with the stage that is loaded next.
        __syncthreads();
        load(step + S::STAGES - 1);
        const int stage = (int)(step % S::STAGES);
        mma_block<T, TileA, TileB, A_K_MAJOR, B_K_MAJOR, S::BK>(
            tiles_a + stage * TileA::SIZE, tiles_b + stage * TileB::SIZE, row, column, acc);
    }
    store_chains(p, first_row + row, first_column + column, acc);
}

// The fastest way in which all chunks of 16 bytes of an operand can be read.
template <typename T> Reading reading(const Operand<T>& from, long long K) {
    constexpr long long PER_CHUNK = 16 / (long long)sizeof(T);
    if (reinterpret_cast<uintptr_t>(from.data) % 16 != 0) return Reading::ELEMENTS;
    const bool one_row = from.rows == 1, one_k = K == 1;
    if ((from.k_stride == 1 || one_k) && (one_row || from.row_stride % PER_CHUNK == 0)) {
        return Reading::ALONG_K;
    }
    if ((from.row_stride == 1 || one_row) && (one_k || from.k_stride % PER_CHUNK == 0)) {
        return Reading::ALONG_ROWS;
    }
    return Reading::ELEMENTS;
}

template <typename T, typename S, Reading READ_A, Reading READ_B>
cudaError_t launch(const MmaChainProduct& p, const Operand<T>& a, const Operand<T>& b) {
    const auto kernel = chain<T, S, READ_A, READ_B>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error != cudaSuccess) return error;
    const long long blocks = (p.M + S::BM - 1) / S::BM * ((p.N + S::BN - 1) / S::BN);
    kernel<<<(unsigned)blocks, S::THREADS, S::SHARED, static_cast<cudaStream_t>(p.stream)>>>(p, a,
                                                                                             b);
    return cudaGetLastError();
}

template <typename T, typename S> cudaError_t launch_reading(const MmaChainProduct& p) {
    const Operand<T> a{static_cast<const T*>(p.a), p.M, p.a_stride_m, p.a_stride_k};
    const Operand<T> b{static_cast<const T*>(p.b), p.N, p.b_stride_n, p.b_stride_k};
    // No layer reads a along rows and b along K: that is left to the reading by elements.
    const Reading of_a = reading(a, p.K), of_b = reading(b, p.K);
    constexpr Reading K = Reading::ALONG_K, R = Reading::ALONG_ROWS, E = Reading::ELEMENTS;
    if (of_a == K && of_b == K) return launch<T, S, K, K>(p, a, b);
    if (of_a == K && of_b == R) return launch<T, S, K, R>(p, a, b);
    if (of_a == R && of_b == R) return launch<T, S, R, R>(p, a, b);
    return launch<T, S, E, E>(p, a, b);
}

template <typename T> cudaError_t launch_tile(const MmaChainProduct& p) {
    if (p.tile_m == 16 && p.tile_n == 32) return launch_reading<T, Shape<T, 16, 32, 1, 4, 4>>(p);
    if (p.tile_m == 64 && p.tile_n == 64) return launch_reading<T, Shape<T, 64, 64, 2, 2, 4>>(p);
    if (p.tile_m == 128 && p.tile_n == 128) {
        return launch_reading<T, Shape<T, 128, 128, 2, 4, 3>>(p);
    }
    return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace rlk

int rlk_mma_chain_product(const MmaChainProduct* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    return rlk::by_dtype(a->dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) == 2) {
            const cudaError_t error = a->wgmma < 0 ? rlk::NO_WGMMA : rlk::launch_wgmma<T>(*a);
            if (error != rlk::NO_WGMMA) return error;
        }
        return rlk::launch_tile<T>(*a);
    });
}
