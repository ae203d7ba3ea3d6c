// SPDX-License-Identifier: Apache-2.0
// How the backward gets a lane's share of one row after another, ahead of its use.
#pragma once
#include <type_traits>

#include "rlk_qwen3next/rms_norm/copies.cuh"
#include "rlk_qwen3next/rms_norm/device_cuda.cuh"

namespace rlk {

// One row's operands of a lane, as loaded.
template <typename T> struct BackwardRow {
    Packed<T> dy, x, beside;
    float rstd;
};

// Where the operands of a lane's next turn lie.
template <typename T, typename N> struct BackwardCursor {
    Cursor<T> dy, x, beside;
    // From one row of a turn to the next.
    long long dy_apart, x_apart, beside_apart, rstd_apart, rstd_step;
    const float* rstd;
    Turns<TURN_ROWS> turns;
    int turn = 0, count;

    __device__ __forceinline__ BackwardCursor(const NormArguments<T>& a,
                                              const Turns<TURN_ROWS>& turns, int column)
        : dy(a.dy, turns.row, column, turns.step), x(a.x, turns.row, column, turns.step),
          beside(N::BESIDE ? a.beside : a.x, turns.row, column, turns.step),
          dy_apart(turns.apart * a.dy.row_stride), x_apart(turns.apart * a.x.row_stride),
          beside_apart(turns.apart * a.beside.row_stride), rstd_apart(turns.apart * a.rstd_stride),
          rstd_step(turns.step * a.rstd_stride), rstd(a.rstd + turns.row * a.rstd_stride),
          turns(turns), count(elements_inside(column, a.columns)) {}
    __device__ __forceinline__ void advance() {
        dy.advance();
        x.advance();
        if (N::BESIDE) beside.advance();
        rstd += rstd_step;
        ++turn;
    }
};

// Turns on their way: a thread copies its own share of the next rows to shared memory while it
// works on these, so that many bytes are in flight without holding registers.
template <typename T, typename N, int AHEAD> struct RowRing {
    static constexpr int STAGES = AHEAD / TURN_ROWS;
    static constexpr int TENSORS = N::BESIDE ? 3 : 2;
    static constexpr int WORDS = Packed<T>::WORDS;
    static constexpr int ROW_WORDS = TENSORS * WORDS;

    BackwardCursor<T, N> cursor;
    uint4* words;  // [STAGES][TURN_ROWS][ROW_WORDS][threads], this thread's
    float* rstds;  // [STAGES][TURN_ROWS][threads], this thread's
    int threads, stage;

    static constexpr int bytes(int threads) {
        return STAGES * TURN_ROWS * threads * (ROW_WORDS * (int)sizeof(uint4) + (int)sizeof(float));
    }
    __device__ __forceinline__ RowRing(const NormArguments<T>& a, const Turns<TURN_ROWS>& turns,
                                       int column, int threads, void* shared)
        : cursor(a, turns, column), words(static_cast<uint4*>(shared) + threadIdx.x),
          rstds(reinterpret_cast<float*>(static_cast<uint4*>(shared) +
                                         STAGES * TURN_ROWS * ROW_WORDS * threads) +
                threadIdx.x),
          threads(threads), stage(0) {
        for (int s = 0; s < STAGES; ++s) fetch(s);
    }
    __device__ __forceinline__ void fetch(int s) {
        uint4* to = words + s * TURN_ROWS * ROW_WORDS * threads;
        float* rstd_to = rstds + s * TURN_ROWS * threads;
#pragma unroll
        for (int u = 0; u < TURN_ROWS; ++u, to += ROW_WORDS * threads, rstd_to += threads) {
            const bool exists = cursor.turns.inside(cursor.turn, u, cursor.count) > 0;
            copy_eight(cursor.dy.at + u * cursor.dy_apart, to, threads, exists);
            copy_eight(cursor.x.at + u * cursor.x_apart, to + WORDS * threads, threads, exists);
            if (N::BESIDE) {
                copy_eight(cursor.beside.at + u * cursor.beside_apart, to + 2 * WORDS * threads,
                           threads, exists);
            }
            copy_or_zero<sizeof(float)>(rstd_to, cursor.rstd + u * cursor.rstd_apart, exists);
        }
        cursor.advance();
        __pipeline_commit();
    }
    // The rows in front, whose place is then given to those STAGES turns later.
    __device__ __forceinline__ void next(int turn, BackwardRow<T> (&rows)[TURN_ROWS]) {
        wait_for_copies<STAGES - 1>();
        const uint4* from = words + stage * TURN_ROWS * ROW_WORDS * threads;
#pragma unroll
        for (int u = 0; u < TURN_ROWS; ++u, from += ROW_WORDS * threads) {
            rows[u].dy = copied_eight<T>(from, threads);
            rows[u].x = copied_eight<T>(from + WORDS * threads, threads);
            if (N::BESIDE) rows[u].beside = copied_eight<T>(from + 2 * WORDS * threads, threads);
            rows[u].rstd = rstds[(stage * TURN_ROWS + u) * threads];
        }
        fetch(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    // After the last turn: no copy is on its way, zeros of rows that do not exist among them, and
    // other things may take the ring's place.
    __device__ __forceinline__ void finish() const { wait_for_copies<0>(); }
};

// Where a ring does not fit or words cannot be read: rows are loaded when they are needed.
template <typename T, typename N, bool VECTOR> struct RowByRow {
    BackwardCursor<T, N> cursor;

    static constexpr int bytes(int) { return 0; }
    __device__ __forceinline__ RowByRow(const NormArguments<T>& a, const Turns<TURN_ROWS>& turns,
                                        int column, int, void*)
        : cursor(a, turns, column) {}
    __device__ __forceinline__ void next(int turn, BackwardRow<T> (&rows)[TURN_ROWS]) {
#pragma unroll
        for (int u = 0; u < TURN_ROWS; ++u) {
            const int inside = cursor.turns.inside(turn, u, cursor.count);
            rows[u].dy = cursor.dy.template load<VECTOR>(inside, u * cursor.dy_apart);
            rows[u].x = cursor.x.template load<VECTOR>(inside, u * cursor.x_apart);
            if (N::BESIDE) {
                rows[u].beside =
                    cursor.beside.template load<VECTOR>(inside, u * cursor.beside_apart);
            }
            rows[u].rstd = inside > 0 ? cursor.rstd[u * cursor.rstd_apart] : 0.0f;
        }
        cursor.advance();
    }
    __device__ __forceinline__ void finish() const {}
};

// 4: rows ahead of 2-byte elements; 2 of FP32, the same bytes in flight.
template <typename T> constexpr int ROWS_AHEAD = sizeof(T) == 2 ? 4 : 2;

// AHEAD rows on their way, or none.
template <typename T, typename N, bool VECTOR, int AHEAD>
using RowSource =
    std::conditional_t<VECTOR && AHEAD != 0, RowRing<T, N, AHEAD>, RowByRow<T, N, VECTOR>>;

}  // namespace rlk
