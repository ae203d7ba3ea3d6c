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
// 2: FP64 levels below the registers; three hold 159 bits, more than any real batch spans.
constexpr int DEEPER_LEVELS = 2;

// The integer state [13, columns] in global memory.
struct ExactState {
    long long* data;
    long long columns;

    __device__ __forceinline__ void add(int row, long long column, long long value) const {
        atomicAdd(reinterpret_cast<unsigned long long*>(data + row * columns + column),
                  (unsigned long long)value);
    }

    // Add a finite double that is a multiple of 2^-149, as every sum of FP32 values is.
    __device__ __noinline__ void add_exact(long long column, double value) const {
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
            if (piece != 0) add(limb, column, negative ? -piece : piece);
        }
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

// The rare addition: inexact in the first level, or not finite. `deeper` are this thread's
// levels of this column, `stride` apart.
static __device__ __noinline__ double add_deeper(double level, double term, double* deeper,
                                                 int stride, ExactState state,
                                                 long long column) {
    if (!isfinite(term)) {
        state.count_special(column, (float)term);
        return level;
    }
    double error;
    level = two_sum(level, term, error);
    for (int i = 0; i < DEEPER_LEVELS && error != 0.0; ++i) {
        deeper[i * stride] = two_sum(deeper[i * stride], error, error);
    }
    if (error != 0.0) state.add_exact(column, error);
    return level;
}

// Add one term to a level in a register; the term is an FP32 value or another exact level.
__device__ __forceinline__ double add_exactly(double level, double term, double* deeper,
                                              int stride, ExactState state, long long column) {
    const double sum = __dadd_rn(level, term);
    const bool exact = (__dsub_rn(sum, level) == term) & (__dsub_rn(sum, term) == level);
    return exact ? sum : add_deeper(level, term, deeper, stride, state, column);
}

// The sums of a thread's columns: the first level in registers, the deeper in shared memory.
template <int COLUMNS> struct ColumnSums {
    double level[COLUMNS];
    double* deeper;  // [COLUMNS][DEEPER_LEVELS][threads], this thread's
    int threads;

    // What a block of `threads` needs in shared memory.
    __host__ __device__ static int deeper_doubles(int threads) {
        return COLUMNS * DEEPER_LEVELS * threads;
    }
    __device__ __forceinline__ void clear(double* shared) {
        threads = blockDim.x;
        deeper = shared + threadIdx.x;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            level[i] = 0.0;
            for (int d = 0; d < DEEPER_LEVELS; ++d) of(i)[d * threads] = 0.0;
        }
    }
    __device__ __forceinline__ double* of(int i) const {
        return deeper + i * DEEPER_LEVELS * threads;
    }
    // One branch for all columns, so that their additions overlap.
    __device__ __forceinline__ void add(const float (&terms)[COLUMNS], ExactState state,
                                        long long column) {
        double sum[COLUMNS];
        bool exact = true;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const double term = (double)terms[i];
            sum[i] = __dadd_rn(level[i], term);
            exact &= (__dsub_rn(sum[i], level[i]) == term) & (__dsub_rn(sum[i], term) == level[i]);
        }
        if (exact) {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) level[i] = sum[i];
        } else {
            add_inexact(terms, sum, state, column);
        }
    }
    // What the first level lost goes deeper. No branch and no store stands between the columns,
    // so that their chains of additions overlap.
    __device__ __forceinline__ void add_inexact(const float (&terms)[COLUMNS],
                                                double (&sum)[COLUMNS], ExactState state,
                                                long long column) {
        double error[COLUMNS];
        bool finite = true;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            error[i] = isfinite(terms[i]) ? (double)terms[i] : 0.0;
            finite &= isfinite(terms[i]);
        }
        if (!finite) count_specials(terms, state, column);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) level[i] = two_sum(level[i], error[i], error[i]);
#pragma unroll
        for (int d = 0; d < DEEPER_LEVELS; ++d) {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) sum[i] = of(i)[d * threads];
            bool lost = false;
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                sum[i] = two_sum(sum[i], error[i], error[i]);
                lost |= error[i] != 0.0;
            }
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) of(i)[d * threads] = sum[i];
            if (!lost) return;
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (error[i] != 0.0) state.add_exact(column + i, error[i]);
        }
    }
    __device__ __forceinline__ static void count_specials(const float (&terms)[COLUMNS],
                                                          ExactState state, long long column) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (!isfinite(terms[i])) state.count_special(column + i, terms[i]);
        }
    }
    // Deeper levels are rarely used: what is there goes straight to the state.
    __device__ __forceinline__ void flush_deeper(ExactState state, long long column) const {
        for (int i = 0; i < COLUMNS; ++i) {
            for (int d = 0; d < DEEPER_LEVELS; ++d) {
                const double value = of(i)[d * threads];
                if (value != 0.0) state.add_exact(column + i, value);
            }
        }
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
