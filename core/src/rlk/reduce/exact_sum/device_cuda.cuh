// SPDX-License-Identifier: Apache-2.0
// Exact column sums in CUDA. A thread owns a few columns and adds FP32 contributions to FP64
// levels: an addition is kept if it was exact, which two subtractions prove; what it lost, also
// exact, goes one level deeper, and from the last level to the integer state in global memory.
// So no window has to be guessed and no order can matter.
#pragma once
#include "rlk/math/device_cuda.cuh"

namespace rlk {

// As in golden.py: 10 limbs of 32 bits from 2^-149 up, then counters of NaN, +Inf and -Inf.
constexpr int LIMBS = 10;
constexpr int STATE_ROWS = LIMBS + 3;
// 3: levels of a sum, the first in a register; they hold 159 bits, more than any real batch spans.
constexpr int LEVELS = 3;
// 2: levels that a block leaves in its workspace; what is deeper is rare and goes to the state.
constexpr int PARTIAL_LEVELS = 2;
// 256: columns that one flag of `Partials` speaks for.
constexpr int FLAG_COLUMNS = 256;

// Cut a finite double that is a multiple of 2^-149, as every sum of FP32 values is, into 32-bit
// pieces with its sign: `add(limb, piece)` for each.
template <typename Add> __device__ __forceinline__ void split_exact(double value, Add add) {
    const unsigned long long bits = (unsigned long long)__double_as_longlong(value);
    const int exponent = (int)(bits >> 52) & 2047;
    if (exponent == 0) return;
    unsigned long long mantissa = (bits & ((1ull << 52) - 1)) | (1ull << 52);
    // 1075: value = mantissa * 2^(exponent - 1075)
    int place = exponent - 1075 + 149;
    if (place < 0) {
        mantissa >>= -place;  // only zeros leave: nothing lies below 2^-149
        place = 0;
    }
    const bool negative = (long long)bits < 0;
    unsigned __int128 rest = (unsigned __int128)mantissa << (place & 31);
    for (int limb = place >> 5; limb < LIMBS && rest != 0; ++limb, rest >>= 32) {
        const long long piece = (long long)((uint32_t)rest);
        if (piece != 0) add(limb, negative ? -piece : piece);
    }
}

// The integer state [13, columns] in global memory.
struct ExactState {
    long long* data;
    long long columns;

    __device__ __forceinline__ void add(int row, long long column, long long value) const {
        atomicAdd(reinterpret_cast<unsigned long long*>(data + row * columns + column),
                  (unsigned long long)value);
    }

    __device__ __noinline__ void add_exact(long long column, double value) const {
        split_exact(value, [&](int limb, long long piece) { add(limb, column, piece); });
    }

    __device__ __noinline__ void count_special(long long column, float value) const {
        const bool nan = value != value;
        add(nan ? LIMBS : (value > 0.0f ? LIMBS + 1 : LIMBS + 2), column, 1);
    }
};

__device__ __forceinline__ double two_sum(double a, double b, double& error) {
    const double sum = __dadd_rn(a, b);
    const double part = __dsub_rn(sum, a);
    error = __dadd_rn(__dsub_rn(a, __dsub_rn(sum, part)), __dsub_rn(b, part));
    return sum;
}

// What the blocks of a first pass leave to the second, `kernel_combine.cuh`: finite doubles whose
// exact sum, with what went to the state, is that of the block's terms.
struct Partials {
    double* values;  // [blocks][PARTIAL_LEVELS][columns]
    int* deep;       // [blocks][flags]: whether there is more than the first level
    long long columns;

    __host__ __device__ static int flags(long long columns) {
        return (int)((columns + FLAG_COLUMNS - 1) / FLAG_COLUMNS);
    }
    static long long bytes(long long blocks, long long columns) {
        return blocks * (PARTIAL_LEVELS * columns * (long long)sizeof(double) +
                         flags(columns) * (long long)sizeof(int));
    }
    Partials() = default;
    Partials(void* workspace, long long blocks, long long columns)
        : values(static_cast<double*>(workspace)),
          deep(reinterpret_cast<int*>(values + blocks * PARTIAL_LEVELS * columns)), columns(columns) {}
    __device__ __forceinline__ double& at(long long block, int level, long long column) const {
        return values[(block * PARTIAL_LEVELS + level) * columns + column];
    }
    __device__ __forceinline__ int& flag(long long block, long long column) const {
        return deep[block * flags(columns) + column / FLAG_COLUMNS];
    }
};

// The sums of a thread's columns: the first level in registers, the deeper in shared memory.
// `Rest` is told what fits no level, as `ExactState` is, which adds it.
template <int COLUMNS, typename Rest = ExactState> struct ColumnSums {
    double level[COLUMNS];
    double* deeper;  // [LEVELS][COLUMNS][threads], this thread's; the last is for `merge` alone
    int threads;
    bool spread;  // the last terms spread over levels: the next ones are not tried on one

    // What a block of `threads` needs in shared memory.
    __host__ __device__ static constexpr int doubles(int threads, bool merges) {
        return COLUMNS * (merges ? LEVELS : LEVELS - 1) * threads;
    }

    __device__ __forceinline__ void clear(double* shared, int block_threads) {
        threads = block_threads;
        spread = false;
        deeper = shared + threadIdx.x;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) level[i] = 0.0;
        for (int i = 0; i < (LEVELS - 1) * COLUMNS; ++i) deeper[i * threads] = 0.0;
    }
    // Terms of a few rows; one branch for all, so that their additions overlap.
    template <int ROWS>
    __device__ __forceinline__ void add(const float (&terms)[ROWS][COLUMNS], Rest lost,
                                        long long column) {
        if (!spread && add_exactly(terms)) return;
        spread = false;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) spread |= add_inexact(terms[u], lost, column);
    }
    // To the first level alone, if it loses nothing.
    template <int ROWS>
    __device__ __forceinline__ bool add_exactly(const float (&terms)[ROWS][COLUMNS]) {
        double sum[COLUMNS];
        bool exact = true;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            sum[i] = level[i];
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                const double term = (double)terms[u][i], before = sum[i];
                sum[i] = __dadd_rn(before, term);
                exact &= (__dsub_rn(sum[i], before) == term) & (__dsub_rn(sum[i], term) == before);
            }
        }
        if (!exact) return false;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) level[i] = sum[i];
        return true;
    }
    // What the first level loses goes deeper. No branch and no store stands between the columns,
    // so that their chains of additions overlap. Whether anything was lost.
    __device__ __forceinline__ bool add_inexact(const float (&terms)[COLUMNS], Rest lost,
                                                long long column) {
        double rest[COLUMNS];
        bool special = false, left = false;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            rest[i] = isfinite(terms[i]) ? (double)terms[i] : 0.0;
            special |= !isfinite(terms[i]);
        }
        if (special) count_specials(terms, lost, column);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            level[i] = two_sum(level[i], rest[i], rest[i]);
            left |= rest[i] != 0.0;
        }
        if (!left) return false;
#pragma unroll
        for (int d = 1; d < LEVELS; ++d) {
            left = false;
            double sum[COLUMNS];
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) sum[i] = at(d, i);
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                sum[i] = two_sum(sum[i], rest[i], rest[i]);
                left |= rest[i] != 0.0;
            }
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) at(d, i) = sum[i];
            if (!left) return true;
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (rest[i] != 0.0) lost.add_exact(column + i, rest[i]);
        }
        return true;
    }
    __device__ __forceinline__ double& at(int d, int i) const {
        return deeper[(slot(d) * COLUMNS + i) * threads];
    }
    __device__ __forceinline__ static constexpr int slot(int d) {
        return d == 0 ? LEVELS - 1 : d - 1;
    }
    __device__ __forceinline__ static void count_specials(const float (&terms)[COLUMNS],
                                                          Rest lost, long long column) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (!isfinite(terms[i])) lost.count_special(column + i, terms[i]);
        }
    }
    // At the end, where no second pass follows: all that the levels hold, to the state.
    __device__ __forceinline__ void flush(ExactState state, long long column) const {
        for (int i = 0; i < COLUMNS; ++i) {
            state.add_exact(column + i, level[i]);
            for (int d = 1; d < LEVELS; ++d) state.add_exact(column + i, at(d, i));
        }
    }
    // The same of a whole block, whose threads have all columns from `first` on in order: neighbours
    // in memory are added by neighbouring threads. `staged` is shared memory of `staged_doubles`.
    __host__ __device__ static constexpr int staged_doubles(int threads) {
        return COLUMNS * (threads + 1);
    }
    __device__ __forceinline__ void flush_block(ExactState state, long long first, int count,
                                                double* staged) const {
        const int levels = __syncthreads_or(is_deep()) ? LEVELS : 1;
        for (int d = 0; d < levels; ++d) {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                // One more than the threads: columns of one thread lie in unlike banks.
                staged[i * (threads + 1) + threadIdx.x] = d == 0 ? level[i] : at(d, i);
            }
            __syncthreads();
            for (int i = threadIdx.x; i < count && i < COLUMNS * threads; i += threads) {
                state.add_exact(first + i, staged[i % COLUMNS * (threads + 1) + i / COLUMNS]);
            }
            __syncthreads();
        }
    }
    __device__ __forceinline__ bool is_deep() const {
        bool deep = false;
        for (int i = 0; i < (LEVELS - 1) * COLUMNS; ++i) deep |= deeper[i * threads] != 0.0;
        return deep;
    }
    // At the end, where no other thread of the block has these columns. Whole warps call.
    __device__ __forceinline__ void store(Partials to, ExactState state, long long column) const {
        const bool deep = __any_sync(0xffffffffu, is_deep());
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (column + i >= state.columns) break;
            store_column(to, state, column + i, deep, [&](int d) { return d ? at(d, i) : level[i]; });
        }
        if (threadIdx.x % 32 == 0 && column < state.columns) to.flag(blockIdx.x, column) = deep;
    }
    // The levels of one column, by a function of their depth.
    template <typename Level>
    __device__ __forceinline__ static void store_column(Partials to, ExactState state,
                                                        long long column, bool deep, Level of) {
        to.at(blockIdx.x, 0, column) = of(0);
#pragma unroll
        for (int d = 1; d < LEVELS; ++d) {
            if (!deep) break;
            if (d < PARTIAL_LEVELS) {
                to.at(blockIdx.x, d, column) = of(d);
            } else {
                state.add_exact(column, of(d));
            }
        }
    }
    // At the end, where groups of LANES threads have the same columns, from `first` on: the sums
    // of all groups, through shared memory. Whole blocks call.
    template <int LANES>
    __device__ __forceinline__ void merge(Partials to, ExactState state, long long first) {
        constexpr int WIDTH = LANES * COLUMNS;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) at(0, i) = level[i];
        const int levels = __syncthreads_or(is_deep()) ? LEVELS : 1;
        const long long column = first + threadIdx.x;
        if (threadIdx.x >= WIDTH || column >= state.columns) return;
        // From this thread's slots to those of the first thread of its column.
        const double* sums = deeper - threadIdx.x + threadIdx.x % COLUMNS * threads +
                             threadIdx.x / COLUMNS;
        double total[LEVELS] = {0.0};
        for (int d = 0; d < levels; ++d) {
            for (int thread = 0; thread < threads; thread += LANES) {
                double rest = sums[slot(d) * COLUMNS * threads + thread];
#pragma unroll
                for (int t = 0; t < LEVELS; ++t) {
                    if (rest != 0.0) total[t] = two_sum(total[t], rest, rest);
                }
                if (rest != 0.0) state.add_exact(column, rest);
            }
        }
        store_column(to, state, column, true, [&](int d) { return total[d]; });
        if (threadIdx.x == 0) to.flag(blockIdx.x, column) = 1;
    }
};

// Carry all limbs of one column, so that digits lie in [0, 2^32) below the signed top limb.
__device__ __forceinline__ void normalise_limbs(long long (&limb)[LIMBS]) {
    long long carry = 0;
#pragma unroll
    for (int i = 0; i < LIMBS - 1; ++i) {
        const long long total = limb[i] + carry;
        limb[i] = total & 0xffffffffll;
        carry = total >> 32;
    }
    limb[LIMBS - 1] += carry;
}

}  // namespace rlk
