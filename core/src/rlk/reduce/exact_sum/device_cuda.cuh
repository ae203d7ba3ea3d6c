// SPDX-License-Identifier: Apache-2.0
// Exact column sums in CUDA. A thread owns a few columns and adds FP32 contributions to FP64
// levels: what an addition to one loses, exactly, goes one level deeper, and from the last to an
// integer state. So no order can matter. `WindowSums` in window_cuda.cuh adds to the first level.
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

// A sum of doubles in two.
struct PairOfDoubles {
    double high = 0.0, low = 0.0;

    // What they do not take of it, exactly.
    __device__ __forceinline__ double add(double value) {
        double error;
        high = two_sum(high, value, error);
        low = two_sum(low, error, error);
        return error;
    }
    // What they hold in one double, to odd: its last bit says on which side of it the sum lies, so
    // that the rounding that follows is the only one.
    __device__ __forceinline__ double to_odd() const {
        double rest;
        const double near = two_sum(high, low, rest);
        const long long bits = __double_as_longlong(near);
        if (rest == 0.0 || (bits & 1)) return near;
        return __longlong_as_double((near < 0.0) == (rest < 0.0) ? bits + 1 : bits - 1);
    }
};

// What the blocks of a first pass leave to the second, `kernel_combine.cuh`: finite doubles whose
// exact sum, with the blocks' rests or what went to the state, is that of the blocks' terms.
struct Partials {
    double* values;  // [blocks][PARTIAL_LEVELS][columns]
    long long* rest;  // [blocks][STATE_ROWS][columns], read where a flag says so; null without
    int* found;  // [blocks][flags]
    long long columns;

    // Bits of a flag: there is more than the first level; there is a rest.
    static constexpr int DEEP = 1, REST = 2;

    __host__ __device__ static int flags(long long columns) {
        return (int)((columns + FLAG_COLUMNS - 1) / FLAG_COLUMNS);
    }
    static long long bytes(long long blocks, long long columns, bool rests) {
        const long long doubles = PARTIAL_LEVELS + (rests ? STATE_ROWS : 0);
        return blocks * (doubles * columns * (long long)sizeof(double) +
                         flags(columns) * (long long)sizeof(int));
    }
    Partials() = default;
    Partials(void* workspace, long long blocks, long long columns, bool rests)
        : values(static_cast<double*>(workspace)), columns(columns) {
        long long* after = reinterpret_cast<long long*>(values + blocks * PARTIAL_LEVELS * columns);
        rest = rests ? after : nullptr;
        found = reinterpret_cast<int*>(after + (rests ? blocks * STATE_ROWS * columns : 0));
    }
    __device__ __forceinline__ double& at(long long block, int level, long long column) const {
        return values[(block * PARTIAL_LEVELS + level) * columns + column];
    }
    __device__ __forceinline__ long long& rest_at(long long block, int row,
                                                  long long column) const {
        return rest[(block * STATE_ROWS + row) * columns + column];
    }
    __device__ __forceinline__ int& flag(long long block, long long column) const {
        return found[block * flags(columns) + column / FLAG_COLUMNS];
    }
};

// What all threads of a block know of a column's sum, and whether there is something of any column in
// their state besides.
struct Merged {
    PairOfDoubles sum;
    bool left;

    // COUNT values, `apart` from each other; what the pair does not hold to `rest`.
    template <int COUNT>
    __device__ __forceinline__ void add(const double* values, int apart, ExactState rest,
                                        int column) {
        double lost[COUNT];
        bool all = true;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) lost[i] = values[i * apart];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            lost[i] = sum.add(lost[i]);
            all &= lost[i] == 0.0;
        }
        if (all) return;
        left = true;
        for (int i = 0; i < COUNT; ++i) rest.add_exact(column, lost[i]);
    }
    // For the second pass: by the first WIDTH threads of a block, of columns from `first` on. Whole
    // blocks call.
    template <int WIDTH, int THREADS>
    __device__ __forceinline__ void store(Partials to, ExactState rest, long long first) const {
        static_assert(PARTIAL_LEVELS == 2, "a pair of doubles");
        if (threadIdx.x < WIDTH && first + threadIdx.x < to.columns) {
            double* const at = &to.at(blockIdx.x, 0, first + threadIdx.x);
            at[0] = sum.high;
            at[to.columns] = sum.low;
        }
        if (threadIdx.x == 0) {
            to.flag(blockIdx.x, first) = Partials::DEEP | (left ? Partials::REST : 0);
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < STATE_ROWS * WIDTH && left; i += THREADS) {
            if (first + i % WIDTH >= to.columns) continue;
            to.rest_at(blockIdx.x, i / WIDTH, first + i % WIDTH) = rest.data[i];
        }
    }
};

// The sums of a thread's columns: the first level in registers, the deeper in shared memory.
// `Rest` is told what fits no level, as `ExactState` is, which adds it.
template <int COLUMNS, typename Rest = ExactState> struct ColumnSums {
    double level[COLUMNS];
    double* deeper;  // [LEVELS - 1][COLUMNS][threads], this thread's
    int threads;

    // What a block of `threads` needs in shared memory.
    __host__ __device__ static constexpr int doubles(int threads) {
        return COLUMNS * (LEVELS - 1) * threads;
    }

    __device__ __forceinline__ void clear(double* shared, int block_threads) {
        threads = block_threads;
        deeper = shared + threadIdx.x;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) level[i] = 0.0;
        for (int i = 0; i < (LEVELS - 1) * COLUMNS; ++i) deeper[i * threads] = 0.0;
    }
    __device__ __forceinline__ double& at(int d, int i) const {
        return deeper[((d - 1) * COLUMNS + i) * threads];
    }
    // At the end, where no second pass follows: all that the levels hold, to the state.
    __device__ __forceinline__ void flush(ExactState state, long long column) const {
        for (int i = 0; i < COLUMNS; ++i) {
            state.add_exact(column + i, level[i]);
            for (int d = 1; d < LEVELS; ++d) state.add_exact(column + i, at(d, i));
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
            store_column(to, state, column + i, deep,
                         [&](int d) { return d ? at(d, i) : level[i]; });
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
    // What `merge` needs in shared memory.
    __host__ __device__ static constexpr int staged_doubles(int threads) {
        return (COLUMNS + 2) * threads;
    }
    // At the end, where groups of LANES threads have the same columns: what all of them know of a
    // column, by the thread whose number is its place; what fits no pair of doubles is in `rest`,
    // [STATE_ROWS, LANES * COLUMNS] in shared memory. Whole blocks call, after a barrier.
    template <int LANES, int THREADS>
    __device__ __forceinline__ Merged merge(ExactState rest, double* staged) const {
        constexpr int WIDTH = LANES * COLUMNS, GROUPS = THREADS / LANES, PARTS = THREADS / WIDTH;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) staged[i * THREADS + threadIdx.x] = level[i];
        Merged merged{{}, false};
#pragma unroll 1
        for (int i = threadIdx.x; i < STATE_ROWS * WIDTH; i += THREADS) {
            merged.left |= rest.data[i] != 0;
        }
        const bool deep = __syncthreads_or(is_deep());
        // A part of the groups for each thread; from the first of these, the column's thread.
        const int place = threadIdx.x % WIDTH, part = threadIdx.x / WIDTH;
        const int from =
            place % COLUMNS * THREADS + place / COLUMNS + part * LANES * (GROUPS / PARTS);
        const double* sums = staged + from;
#pragma unroll 1
        for (int d = 0; d < (deep ? LEVELS : 1); ++d) {
            if (d > 0) sums = deeper - threadIdx.x + (d - 1) * COLUMNS * THREADS + from;
            merged.template add<GROUPS / PARTS>(sums, LANES, rest, place);
        }
        if (PARTS > 1) {
            double* const pairs = staged + COLUMNS * THREADS;
            pairs[threadIdx.x] = merged.sum.high;
            pairs[THREADS + threadIdx.x] = merged.sum.low;
            __syncthreads();
            // Those of other parts, of both doubles.
            merged.sum = {};
            if (part == 0) merged.template add<2 * PARTS>(pairs + place, WIDTH, rest, place);
        }
        merged.left = __syncthreads_or(merged.left);
        return merged;
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
