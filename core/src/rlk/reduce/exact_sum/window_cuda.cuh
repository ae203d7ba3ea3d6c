// SPDX-License-Identifier: Apache-2.0
// Exact column sums whose first level takes terms of a window of magnitudes, where no addition
// rounds, so that none has to be proven; other terms go deeper. Windows follow the data, and no bit
// depends on them.
#pragma once
#include "rlk/reduce/exact_sum/device_cuda.cuh"

namespace rlk {

template <int COLUMNS, typename Rest = ExactState>
struct WindowSums : ColumnSums<COLUMNS, Rest> {
    using ColumnSums<COLUMNS, Rest>::level;
    using ColumnSums<COLUMNS, Rest>::at;

    // Magnitudes of the terms that the first level takes, and how many rows of them it does before
    // it is looked at: such a term is a multiple of 2^-23 times the smallest, and a sum below ROOM
    // times the largest stays below 2^53 of these with TAKEN more, so that no addition rounds.
    float least, most;
    int left;

    static constexpr int BINADES = 27, TAKEN = 4, ROOM = 4;
    static_assert(BINADES + 3 + 23 == 53 && TAKEN + ROOM == 1 << 3, "first-level sums are exact");

    __device__ __forceinline__ void clear(double* shared, int block_threads) {
        ColumnSums<COLUMNS, Rest>::clear(shared, block_threads);
        // Zeros alone.
        least = 0.0f;
        most = __uint_as_float(1);
        left = 0;
    }
    // Terms of a few rows.
    template <int ROWS>
    __device__ __forceinline__ void add(const float (&terms)[ROWS][COLUMNS], Rest lost,
                                        long long column) {
        make_room<ROWS>(lost, column);
        add_rows(terms, lost, column);
    }
    // Before `add_rows` is called with ROWS rows: empty the first level if its sums have grown.
    template <int ROWS>
    __device__ __forceinline__ void make_room(Rest lost, long long column) {
        static_assert(ROWS <= TAKEN, "rows fit");
        if (left >= ROWS) return;
        const double room = __dmul_rn((double)most, ROOM);
        bool roomy = true;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) roomy &= fabs(level[i]) <= room;
        if (!roomy) *this = emptied(*this, lost, column);
        left = TAKEN;
    }
    // One branch for all terms, so that their additions overlap.
    template <int ROWS>
    __device__ __forceinline__ void add_rows(const float (&terms)[ROWS][COLUMNS], Rest lost,
                                             long long column) {
        bool all = takes_all<false>(terms);
        // Zeros may be added too; most rows have none to test for.
        if (!all) {
            if (least == 0.0f) open_window(terms);
            all = takes_all<true>(terms);
        }
        if (all) {
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
                    level[i] = __dadd_rn(level[i], (double)terms[u][i]);
                }
            }
            left -= ROWS;
            return;
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            add_row(terms[u], lost, column);
        }
    }
    // Of rows that are not all taken, one by one: what is slow is for few of them.
    __device__ __forceinline__ void add_row(const float (&terms)[COLUMNS], Rest lost,
                                            long long column) {
        float one[1][COLUMNS];
        Values<COLUMNS> row;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) one[0][i] = row.at[i] = terms[i];
        if (takes_all<true>(one)) {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) level[i] = __dadd_rn(level[i], (double)terms[i]);
        } else {
            *this = sifted(*this, row, lost, column);
        }
        --left;
    }
    // At the first terms that are not zero, of an empty first level.
    template <int ROWS>
    __device__ __forceinline__ void open_window(const float (&terms)[ROWS][COLUMNS]) {
        // Twice the pattern of a magnitude, which orders them; not those that are not finite.
        uint32_t largest = 0;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                const uint32_t size = 2 * __float_as_uint(terms[u][i]);
                largest = max(largest, size < 0xff000000u ? size : 0u);
            }
        }
        if (largest != 0) move_window(__uint_as_float(largest >> 1));
    }
    __device__ __forceinline__ bool takes(float term) const {
        return (fabsf(term) >= least) & (fabsf(term) < most);
    }
    // Whether it takes every term, or zeros beside. Patterns of magnitudes are in their order, and
    // what lies below `least` is large when that is subtracted: one comparison serves all.
    template <bool ZEROS, int ROWS>
    __device__ __forceinline__ bool takes_all(const float (&terms)[ROWS][COLUMNS]) const {
        const uint32_t lowest = 2 * __float_as_uint(least);
        uint32_t highest = 0;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                // Doubled, it loses its sign.
                const uint32_t place = 2 * __float_as_uint(terms[u][i]) - lowest;
                highest = max(highest, ZEROS && terms[u][i] == 0.0f ? 0u : place);
            }
        }
        return highest < 2 * __float_as_uint(most) - lowest;
    }
    // What seldom happens is a function of its own, by value, so that loops stay short and their
    // sums in registers.
    static __device__ __noinline__ WindowSums emptied(WindowSums sums, Rest lost,
                                                      long long column) {
        for (int i = 0; i < COLUMNS; ++i) {
            sums.add_deeper(i, sums.level[i], lost, column);
            sums.level[i] = 0.0;
        }
        return sums;
    }
    // Add terms that the first level takes to it, and others deeper.
    static __device__ __noinline__ WindowSums sifted(WindowSums sums, Values<COLUMNS> terms,
                                                     Rest lost, long long column) {
        float largest = 0.0f;
        for (int i = 0; i < COLUMNS; ++i) {
            if (isfinite(terms.at[i])) largest = fmaxf(largest, fabsf(terms.at[i]));
        }
        // Down, the window follows at some rows only: scales may alternate.
        if (largest >= sums.most ||
            (sums.left == TAKEN && largest < sums.least && largest > 0.0f)) {
            sums = emptied(sums, lost, column);
            sums.move_window(largest);
        }
        for (int i = 0; i < COLUMNS; ++i) {
            const float term = terms.at[i];
            if (sums.takes(term)) {
                sums.level[i] = __dadd_rn(sums.level[i], (double)term);
            } else if (isfinite(term)) {
                sums.add_deeper(i, (double)term, lost, column);
            } else {
                lost.count_special(column + i, term);
            }
        }
        return sums;
    }
    // Have the first level take terms of up to 8 times the magnitude of `largest`.
    __device__ __forceinline__ void move_window(float largest) {
        // Exponent fields. 254 is the highest that a finite number has; from 0 on, all are taken.
        const int highest = min((int)(__float_as_uint(largest) >> 23) + 4, 254);
        const int lowest = highest - BINADES;
        most = __uint_as_float((uint32_t)highest << 23);
        least = __uint_as_float(lowest > 0 ? (uint32_t)lowest << 23 : 1u);
    }
    // What no level takes is told to `lost`.
    __device__ __forceinline__ void add_deeper(int i, double term, Rest lost,
                                               long long column) const {
        for (int d = 1; d < LEVELS && term != 0.0; ++d) at(d, i) = two_sum(at(d, i), term, term);
        if (term != 0.0) lost.add_exact(column + i, term);
    }
};

}  // namespace rlk
