// SPDX-License-Identifier: Apache-2.0
// The exact sums over a unit of tokens, and what a block that has all tokens of a sample rounds them to.
#pragma once
#include "rlk/reduce/exact_sum/device_round.cuh"
#include "rlk_qwenimage/layer_norm_modulate/device_cuda.cuh"

namespace rlk {

// What a thread knows of its columns beside their levels, a bit for each: nothing for almost all.
struct Found {
    uint32_t bits;

    static constexpr uint32_t COLUMN = 1, PLUS = COLUMN << ELEMENTS, MINUS = PLUS << ELEMENTS,
                              DEEP = MINUS << ELEMENTS;

    // Something fitted no level: the column must be summed again, in integers.
    __device__ __forceinline__ bool lost(int i) const { return bits & COLUMN << i; }
    __device__ __forceinline__ bool plus(int i) const { return bits & PLUS << i; }
    __device__ __forceinline__ bool minus(int i) const { return bits & MINUS << i; }
    __device__ __forceinline__ bool special(int i) const { return plus(i) || minus(i); }
    // The deeper levels of any column hold something.
    __device__ __forceinline__ bool is_deep() const { return bits & DEEP; }
    // Infinities of both signs make a NaN, so that a NaN counts as both.
    __device__ __forceinline__ void count_special(int i, float value) {
        if (!(value < 0.0f)) bits |= PLUS << i;
        if (!(value > 0.0f)) bits |= MINUS << i;
    }
};

// Where a thread keeps what its sums seldom need, in shared memory: the levels below the first and
// what it found.
struct Deeper {
    double* levels;  // [LEVELS - 1][ELEMENTS][threads], this thread's
    Found* found;    // [threads], this thread's

    __host__ __device__ static constexpr int bytes(int threads) {
        return threads * ((LEVELS - 1) * ELEMENTS * (int)sizeof(double) + (int)sizeof(Found));
    }
    // Of a block's sum number `sum`.
    __device__ __forceinline__ Deeper(void* shared, int sum) {
        char* own = static_cast<char*>(shared) + sum * bytes(blockDim.x);
        levels = reinterpret_cast<double*>(own) + threadIdx.x;
        found = reinterpret_cast<Found*>(own + bytes(blockDim.x)) - blockDim.x + threadIdx.x;
    }
    __device__ __forceinline__ double& at(int d, int i) const {
        return levels[((d - 1) * ELEMENTS + i) * blockDim.x];
    }
    __device__ __forceinline__ void clear() const {
        for (int i = 0; i < (LEVELS - 1) * ELEMENTS; ++i) levels[i * blockDim.x] = 0.0;
        found->bits = 0;
    }
    __device__ __forceinline__ void add(int i, double term, Found& by) const {
        if (term == 0.0) return;
#pragma unroll 1
        for (int d = 1; d < LEVELS; ++d) at(d, i) = two_sum(at(d, i), term, term);
        by.bits |= Found::DEEP | (term != 0.0 ? Found::COLUMN << i : 0);
    }
};

// Significant bits of a value.
template <typename T>
constexpr int BITS_OF = sizeof(T) == 4 ? 24 : dtype_of<T>() == kFloat16 ? 11 : 8;

// Sums whose first level takes terms of a window of magnitudes, as WindowSums does. Terms of a turn
// are tested together, by integers: chains of predicates would be waited for. Twice a pattern has no
// sign, and orders magnitudes. BITS: significant bits of a term.
template <int BITS> struct TokenSums {
    using Terms = float[TURN][ELEMENTS];

    double level[ELEMENTS];
    // Twice the pattern of the smallest magnitude that the first level takes, and how far from it
    // others may be; how many rows it takes before it is looked at.
    uint32_t least, range;
    int left;

    // As in WindowSums, where the proof is. Short terms leave bits for a window of more binades, and
    // for more of them.
    static constexpr int ROOM = 4, TAKEN = (BITS > 11 ? 8 : 64) - ROOM;
    static constexpr int BINADES = BITS > 11 ? 27 : 48 - BITS;
    static_assert(BINADES + (BITS > 11 ? 3 : 6) + BITS - 1 == 53, "first-level sums are exact");
    static_assert(TURN <= TAKEN, "a turn fits");
    static constexpr uint32_t INFINITE = 0xff000000u;

    // Of `count` columns. Those of none take nothing but rows of zeros.
    __device__ __forceinline__ void clear(int count) {
        least = 0;
        range = count > 0 ? 0 : 1;
        empty();
    }
    // For the next sums, which begin with the window of these: samples are mostly of one scale.
    __device__ __forceinline__ void restart(const Deeper& deeper, Found found) {
        if (found.bits != 0) deeper.clear();
        empty();
    }
    __device__ __forceinline__ void empty() {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) level[i] = 0.0;
        left = TAKEN;
    }
    // The first `rows` rows of terms, of more or less than there are; others are zeros.
    __device__ __forceinline__ void add_turn(const Terms& terms, int rows, void* shared, int sum) {
        if (left < TURN) look();
        if (takes_all(terms, rows) && left >= TURN) {
            add(terms, 0);
            return;
        }
        const uint32_t largest = largest_of(terms);
        if (range == 0 && largest < INFINITE) aim(largest);
        // Zeros, and terms below the window, whose places are bits: among many there are some.
        if (left >= TURN && (largest == 0 || takes(largest))) {
            uint32_t below = places_below(terms);
            add(terms, below);
            const Deeper deeper(shared, sum);
            while (below != 0) {
                const int place = 31 - __clz((int)below);
                below ^= 1u << place;
                deeper.add(place % ELEMENTS, (double)term_at(terms, place), *deeper.found);
            }
            return;
        }
        Values<TURN * ELEMENTS> values;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) values.at[u * ELEMENTS + i] = terms[u][i];
        }
        // Copies in memory: what a call takes or returns in registers would be moved on other paths.
        TokenSums sums = *this;
        sift(sums, values, shared, sum);
        *this = sums;
    }
    // Whether the first level has room for more terms; by upper halves, which order magnitudes.
    __device__ __forceinline__ void look() {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) largest = max(largest, upper_half(level[i]));
        // 1023 - 127: from exponents of FP32 to those of FP64, twice as far up in half a pattern.
        static_assert(ROOM == 4, "two binades above the window");
        if (largest < ((least + range) >> 3) + ((1023u - 127 + 2) << 21)) left = TAKEN;
    }
    __device__ __forceinline__ static uint32_t upper_half(double value) {
        return (uint32_t)((unsigned long long)__double_as_longlong(value) >> 32) << 1;
    }
    __device__ __forceinline__ static uint32_t magnitude(float term) {
        return __float_as_uint(term) << 1;
    }
    __device__ __forceinline__ bool takes(uint32_t magnitude) const {
        return magnitude - least < range;
    }
    __device__ __forceinline__ bool takes_all(const Terms& terms, int rows) const {
        uint32_t farthest = 0;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            uint32_t far = 0;
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) far = max(far, magnitude(terms[u][i]) - least);
            farthest = u < rows ? max(farthest, far) : farthest;
        }
        return farthest < range;
    }
    // All but those whose places are bits of `without`.
    __device__ __forceinline__ void add(const Terms& terms, uint32_t without) {
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) {
                const float term = without >> (u * ELEMENTS + i) & 1 ? 0.0f : terms[u][i];
                level[i] = __dadd_rn(level[i], (double)term);
            }
        }
        left -= TURN;
    }
    __device__ __forceinline__ uint32_t places_below(const Terms& terms) const {
        uint32_t places = 0;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) {
                // Zero, less one, is above all.
                const bool below = magnitude(terms[u][i]) - 1 < least - 1;
                places |= (uint32_t)below << (u * ELEMENTS + i);
            }
        }
        return places;
    }
    // By comparisons: an index would put terms in memory.
    __device__ __forceinline__ static float term_at(const Terms& terms, int place) {
        float term = 0.0f;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) {
                if (place == u * ELEMENTS + i) term = terms[u][i];
            }
        }
        return term;
    }
    __device__ __forceinline__ static uint32_t largest_of(const Terms& terms) {
        uint32_t largest = 0;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) largest = max(largest, magnitude(terms[u][i]));
        }
        return largest;
    }
    // Have the empty first level take terms of up to 8 times the magnitude of `largest`, if there is
    // one.
    __device__ __forceinline__ void aim(uint32_t largest) {
        if (largest == 0) return;
        // Exponent fields. 254 is the highest that a finite number has; from 0 on, all are taken.
        const int highest = min((int)(largest >> 24) + 4, 254), lowest = highest - BINADES;
        least = lowest > 0 ? (uint32_t)lowest << 24 : 2u;
        range = ((uint32_t)highest << 24) - least;
    }
    // What seldom happens, in few instructions: they are fetched from far away.
    static __device__ __noinline__ void sift(TokenSums& sums, const Values<TURN * ELEMENTS>& terms,
                                             void* shared, int sum) {
        const Deeper deeper(shared, sum);
        Found found = *deeper.found;
        uint32_t largest = 0;
#pragma unroll 1
        for (int k = 0; k < TURN * ELEMENTS; ++k) {
            const uint32_t size = magnitude(terms.at[k]);
            if (size < INFINITE) largest = max(largest, size);
        }
        // Down, the window follows at some rows only: scales may alternate.
        const bool moves = largest >= sums.least + sums.range ||
                           (sums.left == TAKEN && largest < sums.least && largest > 0);
        if (moves || sums.left < TURN) {
#pragma unroll 1
            for (int i = 0; i < ELEMENTS; ++i) {
                deeper.add(i, sums.level[i], found);
                sums.level[i] = 0.0;
            }
            if (moves) sums.aim(largest);
            sums.left = TAKEN;
        }
#pragma unroll 1
        for (int k = 0; k < TURN * ELEMENTS; ++k) {
            const float term = terms.at[k];
            const int i = k % ELEMENTS;
            if (sums.takes(magnitude(term))) {
                sums.level[i] = __dadd_rn(sums.level[i], (double)term);
            } else if (magnitude(term) < INFINITE) {
                deeper.add(i, (double)term, found);
            } else {
                found.count_special(i, term);
            }
        }
        sums.left -= TURN;
        *deeper.found = found;
    }
};

// A term of column `column` of dscale or dshift, from memory.
template <typename T>
__device__ __forceinline__ float sum_term(const Arguments<T>& a, long long sample, long long token,
                                          int column, bool of_scale) {
    const float upstream = to_float(*a.dout.at(sample, token, column));
    if (!of_scale) return upstream;
    const float centred = subtract(to_float(*a.x.at(sample, token, column)),
                                   a.mean.of(sample)[token * a.mean.token_stride]);
    const float rstd = a.rstd.of(sample)[token * a.rstd.token_stride];
    return multiply(upstream, multiply(centred, rstd));
}

// The sums of a thread's columns where the first level alone does not tell them.
template <typename T, int BITS>
__device__ __noinline__ void round_found(const Arguments<T>& a, const TokenSums<BITS>& sums,
                                         void* shared, int sum, long long sample, int column,
                                         Packed<T>& rounded) {
    const Deeper deeper(shared, sum);
    const Found found = *deeper.found;
#pragma unroll 1
    for (int i = 0; i < ELEMENTS; ++i) {
        const bool deep = found.is_deep();
        PairOfDoubles total;
        bool all = true;
#pragma unroll 1
        for (int d = 0; d < (deep ? LEVELS : 1); ++d) {
            all &= total.add(d == 0 ? sums.level[i] : deeper.at(d, i)) == 0.0;
        }
        if (all && !found.lost(i) && !found.special(i)) {
            rounded.value[i] = round_double<T>(total.to_odd());
            continue;
        }
        long long limb[LIMBS] = {0};
        Specials seen{false, found.plus(i), found.minus(i)};
        const auto add = [&](int k, long long piece) { limb[k] += piece; };
        if (found.lost(i) && !found.special(i)) {
#pragma unroll 1
            for (long long token = 0; token < a.tokens; ++token) {
                split_exact((double)sum_term(a, sample, token, column + i, sum == 0), add);
            }
        } else {
#pragma unroll 1
            for (int d = 0; d < (deep ? LEVELS : 1); ++d) {
                split_exact(d == 0 ? sums.level[i] : deeper.at(d, i), add);
            }
        }
        rounded.value[i] = from_bits<T>(round_column(limb, seen, format_of(dtype_of<T>())));
    }
}

// A block had all tokens of a sample: its sums are finished, and rounded. 8 columns of a thread.
template <bool VECTOR, typename T, int BITS>
__device__ __forceinline__ void finish(const Arguments<T>& a, TokenSums<BITS>& sums, void* shared,
                                       int sum, long long sample, int column, int count, T* out) {
    if (count <= 0) return;
    const Deeper deeper(shared, sum);
    const Found found = *deeper.found;
    Packed<T> rounded;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) rounded.value[i] = round_double<T>(sums.level[i]);
    if (found.bits != 0) {
        // Copies, as in `add_turn`.
        const TokenSums<BITS> kept = sums;
        Packed<T> again;
        round_found(a, kept, shared, sum, sample, column, again);
        rounded = again;
    }
    sums.restart(deeper, found);
    if (out == nullptr) return;
    T* at = out + sample * a.columns + column;
    if (VECTOR) {
        const uint4* words = reinterpret_cast<const uint4*>(&rounded);
#pragma unroll
        for (int w = 0; w < Packed<T>::WORDS; ++w) reinterpret_cast<uint4*>(at)[w] = words[w];
    } else {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            if (i < count) at[i] = rounded.value[i];
        }
    }
}

}  // namespace rlk
