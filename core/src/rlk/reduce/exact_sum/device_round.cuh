// SPDX-License-Identifier: Apache-2.0
// Rounding of an exact sum in CUDA: from limbs, or from the one double that holds it, to nearest even
// in one step. Bits as in golden.py.
#pragma once
#include "rlk/cuda/rows.cuh"
#include "rlk/reduce/exact_sum/device_cuda.cuh"

namespace rlk {

struct Format {
    int precision, lowest_bit;
    uint32_t infinity, sign;
};

__host__ __device__ __forceinline__ Format format_of(int dtype) {
    if (dtype == kBFloat16) return {8, 149 - 133, 0x7f80u, 0x8000u};
    if (dtype == kFloat16) return {11, 149 - 24, 0x7c00u, 0x8000u};
    return {24, 0, 0x7f800000u, 0x80000000u};
}

// 32 bits of a non-negative sum from bit `place` up; `place` may be negative.
__device__ inline uint32_t bits_from(const long long (&limb)[LIMBS], int place) {
    uint64_t pair = 0;
    const int first = place >> 5;
    for (int i = 1; i >= 0; --i) {
        const int at = first + i;
        pair = pair << 32 | (at >= 0 && at < LIMBS ? (uint64_t)limb[at] & 0xffffffffu : 0u);
    }
    return (uint32_t)(pair >> (place & 31));
}

__device__ inline bool any_below(const long long (&limb)[LIMBS], int place) {
    bool any = false;
    for (int i = 0; i < LIMBS; ++i) {
        const int low = place - 32 * i;
        if (low >= 32) any |= limb[i] != 0;
        if (low > 0 && low < 32) any |= (limb[i] & ((1ll << low) - 1)) != 0;
    }
    return any;
}

// To nearest even in one step, from the limbs to the destination.
__device__ inline uint32_t round_limbs(const long long (&limb)[LIMBS], Format form) {
    if (limb[LIMBS - 1] != 0) return form.infinity;
    int top = LIMBS - 1;
    while (top > 0 && limb[top] == 0) --top;
    const int highest = 32 * top + 31 - __clz((int)limb[top]);
    if (limb[top] == 0) return 0;
    int lowest = highest - form.precision + 1;
    lowest = lowest > form.lowest_bit ? lowest : form.lowest_bit;
    uint32_t bits = bits_from(limb, lowest) & ((1u << form.precision) - 1);
    const bool half = bits_from(limb, lowest - 1) & 1;
    bits += half && ((bits & 1) || any_below(limb, lowest - 1));
    bits += (uint32_t)(lowest - form.lowest_bit) << (form.precision - 1);
    return bits < form.infinity ? bits : form.infinity;
}

// Which special values were added to a column; they never enter the limbs.
struct Specials {
    bool nan, positive, negative;

    __device__ __forceinline__ void count(float value) {
        nan |= value != value;
        positive |= isinf(value) && value > 0.0f;
        negative |= isinf(value) && value < 0.0f;
    }
};

// The pattern of a column's sum. Limbs come unnormalised or not, and are used up.
__device__ inline uint32_t round_column(long long (&limb)[LIMBS], Specials seen, Format form) {
    normalise_limbs(limb);
    bool negative = limb[LIMBS - 1] < 0;
    if (negative) {
        for (int i = 0; i < LIMBS; ++i) limb[i] = -limb[i];
        normalise_limbs(limb);
    }
    uint32_t bits = round_limbs(limb, form);
    if (seen.positive || seen.negative) {
        bits = form.infinity;
        negative = seen.negative;
    }
    if (negative) bits |= form.sign;
    if (seen.nan || (seen.positive && seen.negative)) {
        bits = form.infinity | 1u << (form.precision - 2);
    }
    return bits;
}

template <typename T> __host__ __device__ constexpr int dtype_of() {
    return sizeof(T) == 4 ? kFloat32 : kBFloat16;
}
template <> __host__ __device__ constexpr int dtype_of<__half>() { return kFloat16; }

template <typename T> __device__ __forceinline__ T from_bits(uint32_t bits);
template <> __device__ __forceinline__ float from_bits<float>(uint32_t bits) {
    return __uint_as_float(bits);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_bits<__nv_bfloat16>(uint32_t bits) {
    return __ushort_as_bfloat16((unsigned short)bits);
}
template <> __device__ __forceinline__ __half from_bits<__half>(uint32_t bits) {
    return __ushort_as_half((unsigned short)bits);
}

// What becomes of column sums at their end, as the <parameter>_form of a call says: their state; the
// sums rounded once; or the state in FP64, to which autograd adds, beside zeros of the parameter.
enum SumForm : int { kState = 0, kRounded = 1, kCarried = 2 };

struct SumResult {
    ExactState state;  // FP64 numbers where it is carried; not written where sums are rounded
    void* sums;        // [columns]: rounded, or zeros; not written beside a state alone
    int dtype, form;   // the dtype of `sums`
};

// The end of one column, from limbs, normalised or not and used up, and the counters.
__device__ __forceinline__ void store_sum(const SumResult& to, long long column,
                                          long long (&limb)[LIMBS],
                                          const long long (&counter)[STATE_ROWS - LIMBS]) {
    uint32_t bits = 0;
    if (to.form == kRounded) {
        const Specials seen{counter[0] > 0, counter[1] > 0, counter[2] > 0};
        // A copy is found by index, in memory; the other forms have theirs in registers.
        long long indexed[LIMBS];
#pragma unroll
        for (int i = 0; i < LIMBS; ++i) indexed[i] = limb[i];
        bits = round_column(indexed, seen, format_of(to.dtype));
    } else {
        normalise_limbs(limb);
#pragma unroll
        for (int i = 0; i < STATE_ROWS; ++i) {
            const long long digit = i < LIMBS ? limb[i] : counter[i - LIMBS];
            long long* at = to.state.data + i * to.state.columns + column;
            if (to.form == kState) *at = digit;
            // Below 2^53: exact.
            else *reinterpret_cast<double*>(at) = (double)digit;
        }
        if (to.form == kState) return;
    }
    if (to.dtype == kFloat32) static_cast<uint32_t*>(to.sums)[column] = bits;
    else static_cast<uint16_t*>(to.sums)[column] = (uint16_t)bits;
}

// One column of a state, normalised or not, to one of the result.
__device__ __forceinline__ void finish_state(ExactState state, long long from, long long column,
                                             const SumResult& to) {
    long long limb[LIMBS], counter[STATE_ROWS - LIMBS];
#pragma unroll
    for (int i = 0; i < STATE_ROWS; ++i) {
        const long long digit = state.data[i * state.columns + from];
        if (i < LIMBS) limb[i] = digit;
        else counter[i - LIMBS] = digit;
    }
    store_sum(to, column, limb, counter);
}

// A sum that one finite double holds. Narrow dtypes go by an FP32 rounded to odd: its last bit says
// on which side of a tie the sum lies, so that the second rounding is the only one.
template <typename T> __device__ __forceinline__ T round_double(double sum) {
    if (sizeof(T) == 4) return from_float<T>(__double2float_rn(sum));
    const float towards_zero = __double2float_rz(sum);
    const bool inexact = (double)towards_zero != sum;
    return from_float<T>(__uint_as_float(__float_as_uint(towards_zero) | (uint32_t)inexact));
}

// The end of a column that is held by a pair of doubles and, where there is `more`, a state.
static __device__ __noinline__ void store_digits(const SumResult& to, long long column, double high,
                                                 double low, ExactState more, int place) {
    long long limb[LIMBS], counter[STATE_ROWS - LIMBS];
#pragma unroll
    for (int i = 0; i < STATE_ROWS; ++i) {
        const long long digit = more.data[i * more.columns + place];
        if (i < LIMBS) limb[i] = digit;
        else counter[i - LIMBS] = digit;
    }
    long long indexed[LIMBS] = {0};
#pragma unroll 1
    for (int d = 0; d < 2; ++d) {
        split_exact(d == 0 ? high : low, [&](int i, long long piece) { indexed[i] += piece; });
    }
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) limb[i] += indexed[i];
    store_sum(to, column, limb, counter);
}
// The same; mostly a sum is rounded, and the pair is all.
__device__ __forceinline__ void store_pair(const SumResult& to, long long column,
                                           const PairOfDoubles& sum, bool is_all, ExactState more,
                                           int place) {
    if (!is_all || to.form != kRounded) {
        store_digits(to, column, sum.high, sum.low, more, place);
        return;
    }
    const double odd = sum.to_odd();
    if (to.dtype == kFloat32) static_cast<float*>(to.sums)[column] = round_double<float>(odd);
    if (to.dtype == kFloat16) static_cast<__half*>(to.sums)[column] = round_double<__half>(odd);
    if (to.dtype == kBFloat16) {
        static_cast<__nv_bfloat16*>(to.sums)[column] = round_double<__nv_bfloat16>(odd);
    }
}

}  // namespace rlk
