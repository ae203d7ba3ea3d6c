// SPDX-License-Identifier: Apache-2.0
// How the backward gets a lane's share of one token after another, ahead of its use.
#pragma once
#include <cuda_pipeline.h>

#include <type_traits>

#include "rlk_qwenimage/layer_norm_modulate/device_cuda.cuh"

namespace rlk {

// One token's operands of a lane, as loaded.
template <typename T> struct BackwardToken {
    Packed<T> dout, x;
    float mean, rstd;
};

// Where the operands of a lane's next tokens lie, `left` of them.
template <typename T> struct TokenCursor {
    Cursor<T> dout, x;
    long long dout_token, x_token, mean_token, rstd_token;  // from one token to the next
    const float *mean, *rstd;
    long long left;
    int count;

    __device__ __forceinline__ TokenCursor(const Arguments<T>& a, long long sample, long long token,
                                           long long left, int column)
        : dout(a.dout.of(sample), token, column, TURN), x(a.x.of(sample), token, column, TURN),
          dout_token(a.dout.token_stride), x_token(a.x.token_stride),
          mean_token(a.mean.token_stride), rstd_token(a.rstd.token_stride),
          mean(a.mean.of(sample) + token * mean_token), rstd(a.rstd.of(sample) + token * rstd_token),
          left(left), count(elements_inside(column, a.columns)) {}
    __device__ __forceinline__ void advance() {
        dout.advance();
        x.advance();
        mean += TURN * mean_token;
        rstd += TURN * rstd_token;
        left -= TURN;
    }
};

// Turns on their way: a thread copies its own share of the next tokens to shared memory while it
// works on these, so that many bytes are in flight without holding registers.
template <typename T> struct TokenRing {
    // 3 turns ahead of 2-byte elements, 2 of FP32: what shared memory holds beside the sums.
    static constexpr int STAGES = sizeof(T) == 2 ? 3 : 2;
    static constexpr int WORDS = Packed<T>::WORDS;
    static constexpr int TOKEN_WORDS = 2 * WORDS;

    TokenCursor<T> cursor;
    uint4* words;  // [STAGES][TURN][TOKEN_WORDS][threads], this thread's
    float* numbers;  // [STAGES][TURN][2][threads], this thread's
    int threads, stage;

    static int bytes(int threads) {
        return STAGES * TURN * threads * (TOKEN_WORDS * (int)sizeof(uint4) + 2 * (int)sizeof(float));
    }
    __device__ __forceinline__ TokenRing(const TokenCursor<T>& cursor, void* shared)
        : cursor(cursor), words(static_cast<uint4*>(shared) + threadIdx.x),
          numbers(reinterpret_cast<float*>(static_cast<uint4*>(shared) +
                                           STAGES * TURN * TOKEN_WORDS * blockDim.x) + threadIdx.x),
          threads(blockDim.x), stage(0) {
        for (int s = 0; s < STAGES; ++s) fetch(s);
    }
    __device__ __forceinline__ void copy(const T* from, uint4* to) const {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            __pipeline_memcpy_async(to + w * threads, reinterpret_cast<const uint4*>(from) + w,
                                    sizeof(uint4));
        }
    }
    // A token that does not exist, and columns beyond the row, are zeros.
    __device__ __forceinline__ void fetch(int s) {
        uint4* to = words + s * TURN * TOKEN_WORDS * threads;
        float* numbers_to = numbers + s * TURN * 2 * threads;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            if (u < cursor.left && cursor.count > 0) {
                copy(cursor.dout.at + u * cursor.dout_token, to);
                copy(cursor.x.at + u * cursor.x_token, to + WORDS * threads);
                __pipeline_memcpy_async(numbers_to, cursor.mean + u * cursor.mean_token,
                                        sizeof(float));
                __pipeline_memcpy_async(numbers_to + threads, cursor.rstd + u * cursor.rstd_token,
                                        sizeof(float));
            } else {
                for (int w = 0; w < TOKEN_WORDS; ++w) to[w * threads] = make_uint4(0, 0, 0, 0);
                numbers_to[0] = numbers_to[threads] = 0.0f;
            }
            to += TOKEN_WORDS * threads;
            numbers_to += 2 * threads;
        }
        cursor.advance();
        __pipeline_commit();
    }
    __device__ __forceinline__ Packed<T> read(const uint4* from) const {
        Packed<T> packed;
        uint4* to = reinterpret_cast<uint4*>(&packed);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) to[w] = from[w * threads];
        return packed;
    }
    // The tokens in front, whose place is then given to those STAGES turns later.
    __device__ __forceinline__ void next(BackwardToken<T> (&tokens)[TURN]) {
        __pipeline_wait_prior(STAGES - 1);
        const uint4* from = words + stage * TURN * TOKEN_WORDS * threads;
        const float* numbers_from = numbers + stage * TURN * 2 * threads;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            tokens[u].dout = read(from);
            tokens[u].x = read(from + WORDS * threads);
            tokens[u].mean = numbers_from[0];
            tokens[u].rstd = numbers_from[threads];
            from += TOKEN_WORDS * threads;
            numbers_from += 2 * threads;
        }
        fetch(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// Where a ring does not fit or words cannot be read: tokens are loaded when they are needed.
template <typename T, bool VECTOR> struct TokenByToken {
    TokenCursor<T> cursor;

    static int bytes(int) { return 0; }
    __device__ __forceinline__ TokenByToken(const TokenCursor<T>& cursor, void*) : cursor(cursor) {}
    __device__ __forceinline__ void next(BackwardToken<T> (&tokens)[TURN]) {
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            const int inside = u < cursor.left ? cursor.count : 0;
            tokens[u].dout = cursor.dout.template load<VECTOR>(inside, u * cursor.dout_token);
            tokens[u].x = cursor.x.template load<VECTOR>(inside, u * cursor.x_token);
            tokens[u].mean = inside > 0 ? cursor.mean[u * cursor.mean_token] : 0.0f;
            tokens[u].rstd = inside > 0 ? cursor.rstd[u * cursor.rstd_token] : 0.0f;
        }
        cursor.advance();
    }
};

template <typename T, bool VECTOR, int THREADS>
using TokenSource =
    std::conditional_t<VECTOR && THREADS <= 384, TokenRing<T>, TokenByToken<T, VECTOR>>;

}  // namespace rlk
