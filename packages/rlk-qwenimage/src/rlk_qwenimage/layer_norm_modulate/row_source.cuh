// SPDX-License-Identifier: Apache-2.0
// How the forward gets a lane's share of one row after another, ahead of its use.
#pragma once
#include <cuda_pipeline.h>

#include <type_traits>

#include "rlk_qwenimage/layer_norm_modulate/device_cuda.cuh"

namespace rlk {

// Tokens that a block of the forward works on at once: steps that a token takes once (trees, root,
// barrier) are shared by more of them; a block of more threads has not the registers.
template <int THREADS> constexpr int FORWARD_TURN = THREADS <= 384 ? 4 : 2;

// The place of a token among all samples.
struct Place {
    long long sample, token;

    __device__ __forceinline__ Place(long long row, long long tokens)
        : sample(row / tokens), token(row - row / tokens * tokens) {}
};

// Where a lane's share of the next rows lies, `left` of them, `within` of its sample.
template <typename T> struct RowCursor {
    const Arguments<T>& a;
    const T* at;
    long long sample, within, left;
    int column, count;

    __device__ __forceinline__ RowCursor(const Arguments<T>& a, Place place, long long rows,
                                         int column)
        : a(a), at(a.x.at(place.sample, place.token, column)), sample(place.sample),
          within(a.tokens - place.token), left(rows), column(column),
          count(elements_inside(column, a.columns)) {}
    // `rows` further, in the same sample or at the first of the next.
    __device__ __forceinline__ void advance(int rows) {
        left -= rows;
        within -= rows;
        at += rows * a.x.token_stride;
        if (within > 0) return;
        at = a.x.at(++sample, 0, column);
        within = a.tokens;
    }
};

// Turns on their way, as in TokenRing. Two blocks share a processor's
// memory.
template <typename T, int THREADS> struct RowRing {
    static constexpr int STAGES = 2, TOGETHER = FORWARD_TURN<THREADS>;
    static constexpr int WORDS = Packed<T>::WORDS;

    using Row = uint4[WORDS][THREADS];
    RowCursor<T> cursor;
    Row* rows;  // [STAGES * TOGETHER]
    int stage;

    static constexpr int bytes() { return STAGES * TOGETHER * (int)sizeof(Row); }
    __device__ __forceinline__ RowRing(const RowCursor<T>& cursor, void* shared)
        : cursor(cursor), rows(static_cast<Row*>(shared)), stage(0) {
        for (int s = 0; s < STAGES; ++s) fetch(rows + s * TOGETHER);
    }
    __device__ __forceinline__ void copy(const T* from, Row& to) const {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            __pipeline_memcpy_async(&to[w][threadIdx.x], reinterpret_cast<const uint4*>(from) + w,
                                    sizeof(uint4));
        }
    }
    // What does not exist is zeros. No copy is on its way when a block ends.
    __device__ __forceinline__ void fetch(Row* to) {
        if (cursor.left >= TOGETHER && cursor.within >= TOGETHER && cursor.count > 0) {
#pragma unroll
            for (int u = 0; u < TOGETHER; ++u) copy(cursor.at + u * cursor.a.x.token_stride, to[u]);
            cursor.advance(TOGETHER);
        } else if (cursor.left > 0) {
#pragma unroll 1
            for (int u = 0; u < TOGETHER; ++u) {
                if (cursor.left > 0 && cursor.count > 0) {
                    copy(cursor.at, to[u]);
                } else {
                    for (int w = 0; w < WORDS; ++w) to[u][w][threadIdx.x] = make_uint4(0, 0, 0, 0);
                }
                if (cursor.left > 0) cursor.advance(1);
            }
        }
        __pipeline_commit();
    }
    // The rows in front, whose place is then given to those STAGES turns later.
    __device__ __forceinline__ void next(float (&x)[TOGETHER][ELEMENTS]) {
        __pipeline_wait_prior(STAGES - 1);
        // The wait alone does not keep the compiler from loading before it.
        asm volatile("" ::: "memory");
        Row* from = rows + stage * TOGETHER;
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            Packed<T> packed;
            uint4* to = reinterpret_cast<uint4*>(&packed);
#pragma unroll
            for (int w = 0; w < WORDS; ++w) to[w] = from[u][w][threadIdx.x];
            unpack(packed, x[u]);
        }
        fetch(from);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// Where words cannot be read, or a row's block is large: rows are loaded when they are needed.
template <typename T, bool VECTOR, int THREADS> struct RowByRow {
    static constexpr int TOGETHER = FORWARD_TURN<THREADS>;
    RowCursor<T> cursor;

    static constexpr int bytes() { return 0; }
    __device__ __forceinline__ RowByRow(const RowCursor<T>& cursor, void*) : cursor(cursor) {}
    __device__ __forceinline__ void next(float (&x)[TOGETHER][ELEMENTS]) {
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            const int inside = cursor.left > 0 ? cursor.count : 0;
            const Rows<T> rows{cursor.at, 0, cursor.a.x.column_stride};
            unpack(Cursor<T>(rows, 0, 0, 0).template load<VECTOR>(inside), x[u]);
            if (cursor.left > 0) cursor.advance(1);
        }
    }
};

template <typename T, bool VECTOR, int THREADS>
using RowSource =
    std::conditional_t<VECTOR && THREADS <= 384, RowRing<T, THREADS>, RowByRow<T, VECTOR, THREADS>>;

}  // namespace rlk
