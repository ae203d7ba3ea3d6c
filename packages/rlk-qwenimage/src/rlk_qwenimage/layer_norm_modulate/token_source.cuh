// SPDX-License-Identifier: Apache-2.0
// How the backward gets a lane's share of one token after another, ahead of its use.
#pragma once
#include <cuda_pipeline.h>

#include <type_traits>

#include "rlk_qwenimage/layer_norm_modulate/device_cuda.cuh"

namespace rlk {

// How tokens are divided among blocks: samples `first` on, `count` of them, each in `parts` of `per`
// tokens. A part is a unit of work; a block's next one is as many units further as the grid has
// blocks. The launcher sees that units and their tokens are counted in 32 bits.
struct Division {
    long long first;
    int count, parts, per;

    __host__ __device__ int units() const { return count * parts; }
};

// The units of a block, one after another.
struct Units {
    const Division& d;
    int number;

    __device__ __forceinline__ explicit Units(const Division& d) : d(d), number(blockIdx.x) {}
    __device__ __forceinline__ bool inside() const { return number < d.units(); }
    __device__ __forceinline__ void advance() { number += gridDim.x; }
    __device__ __forceinline__ long long sample() const { return d.first + number / d.parts; }
    __device__ __forceinline__ long long token() const {
        return (long long)(number % d.parts) * d.per;
    }
    __device__ __forceinline__ int count(long long tokens) const {
        const long long left = tokens - token();
        return left < d.per ? (int)left : d.per;
    }
};

// One token's operands of a lane, as loaded.
template <typename T> struct BackwardToken {
    Packed<T> dout, x;
    float mean, rstd;
};

// Where the operands of a lane's next tokens lie, `left` of them in this unit. What follows the last
// token of a unit is the first of the block's next one.
template <typename T> struct TokenCursor {
    const Arguments<T>& a;
    Units units;
    const T *dout, *x;
    // 2 * TURN lanes have an own number of a turn each: means, then rstds.
    const float* number;
    int left, column, count;

    __device__ __forceinline__ TokenCursor(const Arguments<T>& a, const Units& units, int column)
        : a(a), units(units), column(column), count(elements_inside(column, a.columns)) {
        start();
    }
    __device__ __forceinline__ void start() {
        left = 0;
        if (!units.inside()) return;
        const long long sample = units.sample(), token = units.token();
        left = units.count(a.tokens);
        dout = a.dout.at(sample, token, column);
        x = a.x.at(sample, token, column);
        number = numbers().of(sample) + (token + threadIdx.x % TURN) * numbers().token_stride;
    }
    __device__ __forceinline__ const Statistic& numbers() const {
        return threadIdx.x % (2 * TURN) < TURN ? a.mean : a.rstd;
    }
    __device__ __forceinline__ void advance() {
        left -= TURN;
        if (left > 0) {
            dout += TURN * a.dout.token_stride;
            x += TURN * a.x.token_stride;
            number += TURN * numbers().token_stride;
        } else {
            units.advance();
            start();
        }
    }
};

// Turns on their way: a thread copies its own share of the next tokens to shared memory while it
// works on these, so that many bytes are in flight without holding registers.
template <typename T, int THREADS> struct TokenRing {
    // 3 turns ahead of 2-byte elements, 2 of FP32: what shared memory holds beside the sums.
    static constexpr int STAGES = sizeof(T) == 2 ? 3 : 2;
    static constexpr int WORDS = Packed<T>::WORDS;

    // A turn of all threads; places are constants from here on, whatever a block has of threads.
    struct Stage {
        uint4 dout[TURN][WORDS][THREADS], x[TURN][WORDS][THREADS];
        float numbers[THREADS / 32][2 * TURN];  // means and rstds, for each warp
    };
    TokenCursor<T> cursor;
    Stage* stages;
    int stage;

    static constexpr int bytes() { return STAGES * (int)sizeof(Stage); }
    __device__ __forceinline__ TokenRing(const TokenCursor<T>& cursor, void* shared)
        : cursor(cursor), stages(static_cast<Stage*>(shared)), stage(0) {
        for (int s = 0; s < STAGES; ++s) fetch(stages[s]);
    }
    __device__ __forceinline__ void copy(const T* from, uint4 (&to)[WORDS][THREADS]) const {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            __pipeline_memcpy_async(&to[w][threadIdx.x], reinterpret_cast<const uint4*>(from) + w,
                                    sizeof(uint4));
        }
    }
    __device__ __forceinline__ void copy_token(Stage& to, int u) const {
        copy(cursor.dout + u * cursor.a.dout.token_stride, to.dout[u]);
        copy(cursor.x + u * cursor.a.x.token_stride, to.x[u]);
    }
    // Lanes need the same numbers: each of the first copies one of them.
    __device__ __forceinline__ void copy_numbers(Stage& to, int tokens) const {
        const int lane = threadIdx.x % 32;
        if (lane >= 2 * TURN) return;
        float* place = &to.numbers[threadIdx.x / 32][lane];
        if (lane % TURN < tokens) __pipeline_memcpy_async(place, cursor.number, sizeof(float));
        else *place = 0.0f;
    }
    // What does not exist is zeros. No copy is on its way when a block ends.
    __device__ __forceinline__ void fetch(Stage& to) {
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        if (cursor.left >= TURN && cursor.count > 0) {
#pragma unroll
            for (int u = 0; u < TURN; ++u) copy_token(to, u);
            copy_numbers(to, TURN);
        } else if (cursor.left > 0) {
            for (int u = 0; u < TURN; ++u) {
                if (u < cursor.left && cursor.count > 0) {
                    copy_token(to, u);
                    continue;
                }
                for (int w = 0; w < WORDS; ++w) {
                    to.dout[u][w][threadIdx.x] = to.x[u][w][threadIdx.x] = zeros;
                }
            }
            copy_numbers(to, cursor.left);
        }
        if (cursor.left > 0) cursor.advance();
        __pipeline_commit();
    }
    __device__ __forceinline__ Packed<T> read(const uint4 (&from)[WORDS][THREADS]) const {
        Packed<T> packed;
        uint4* to = reinterpret_cast<uint4*>(&packed);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) to[w] = from[w][threadIdx.x];
        return packed;
    }
    // The tokens in front, whose place is then given to those STAGES turns later.
    __device__ __forceinline__ void next(BackwardToken<T> (&tokens)[TURN]) {
        __pipeline_wait_prior(STAGES - 1);
        __syncwarp();
        Stage& from = stages[stage];
        const float* numbers = from.numbers[threadIdx.x / 32];
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            tokens[u].dout = read(from.dout[u]);
            tokens[u].x = read(from.x[u]);
            // Beyond the row it is all zeros, so that (x - mean) * rstd is +0 there.
            tokens[u].mean = cursor.count > 0 ? numbers[u] : 0.0f;
            tokens[u].rstd = cursor.count > 0 ? numbers[TURN + u] : 0.0f;
        }
        __syncwarp();
        fetch(from);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// Where a ring does not fit or words cannot be read: tokens are loaded when they are needed.
template <typename T, bool VECTOR> struct TokenByToken {
    TokenCursor<T> cursor;

    static constexpr int bytes() { return 0; }
    __device__ __forceinline__ TokenByToken(const TokenCursor<T>& cursor, void*) : cursor(cursor) {}
    __device__ __forceinline__ Packed<T> load(const Tokens<T>& of, const T* at, int u,
                                              int inside) const {
        return Cursor<T>({at, of.token_stride, of.column_stride}, u, 0, 0).template load<VECTOR>(inside);
    }
    __device__ __forceinline__ void next(BackwardToken<T> (&tokens)[TURN]) {
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            const int inside = u < cursor.left ? cursor.count : 0;
            tokens[u].dout = load(cursor.a.dout, cursor.dout, u, inside);
            tokens[u].x = load(cursor.a.x, cursor.x, u, inside);
        }
        // Whole warps call: lanes have the numbers of each other.
        const int lane = threadIdx.x % TURN;
        const float number = lane < cursor.left ? *cursor.number : 0.0f;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            const float mean = __shfl_sync(0xffffffffu, number, u);
            const float rstd = __shfl_sync(0xffffffffu, number, TURN + u);
            tokens[u].mean = cursor.count > 0 ? mean : 0.0f;
            tokens[u].rstd = cursor.count > 0 ? rstd : 0.0f;
        }
        cursor.advance();
    }
};

template <typename T, bool VECTOR, int THREADS>
using TokenSource =
    std::conditional_t<VECTOR && THREADS <= 384, TokenRing<T, THREADS>, TokenByToken<T, VECTOR>>;

}  // namespace rlk
