// SPDX-License-Identifier: Apache-2.0
// The kernel of both operators: each thread turns the same columns of several heads of one token.
#pragma once
#include "rlk/cuda/rows.cuh"

namespace rlk {

// One of the tensors of a launch, [B, S, heads, columns]; strides in elements, `out` contiguous.
template <typename T> struct Heads {
  const T* in;
  long long stride_b, stride_s, stride_h, stride_d;
  T* out;
  int heads;
  int groups;  // of heads, one for each thread
};

// FP32 [B, S, P], P = pairs.
struct Table {
  const float* data;
  long long stride_b, stride_s, stride_p;
};

template <typename T> struct RopeArguments {
  Heads<T> part[2];
  Table cos, sin;
  long long tokens, sequence;
  int columns, pairs;
  int units;         // of columns in a head, one for each thread
  int block_tokens;  // of a turn of a block
  bool table_words;  // whether tables can be read by 16-byte words
};

// Pairs of a unit, and the heads of which a thread loads that unit before it turns any: 64 bytes of
// narrow types in flight.
template <bool VECTOR, bool INTERLEAVED> struct Unit {
  static constexpr int COLUMNS = VECTOR ? ELEMENTS : 1;  // of a run in memory
  static constexpr int PAIRS = !VECTOR ? 1 : INTERLEAVED ? ELEMENTS / 2 : ELEMENTS;
  static constexpr int HEADS = VECTOR && !INTERLEAVED ? 2 : 4;
};

template <typename T> __device__ __forceinline__ Packed<T> load_words(const T* from) {
  Packed<T> packed;
  uint4* words = reinterpret_cast<uint4*>(&packed);
#pragma unroll
  for (int i = 0; i < Packed<T>::WORDS; ++i) {
    words[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
  }
  return packed;
}

template <typename T> __device__ __forceinline__ void store_words(T* at, const Packed<T>& packed) {
  const uint4* words = reinterpret_cast<const uint4*>(&packed);
#pragma unroll
  for (int i = 0; i < Packed<T>::WORDS; ++i) __stcs(reinterpret_cast<uint4*>(at) + i, words[i]);
}

template <int PAIRS>
__device__ __forceinline__ void load_table(const Table& table, long long b, long long s, int pair,
                                           bool words, float (&out)[PAIRS]) {
  const float* at = table.data + b * table.stride_b + s * table.stride_s + pair * table.stride_p;
  if (PAIRS % 4 == 0 && words) {
#pragma unroll
    for (int i = 0; i < PAIRS / 4; ++i) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(at) + i);
      out[4 * i] = four.x, out[4 * i + 1] = four.y;
      out[4 * i + 2] = four.z, out[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) out[i] = __ldg(at + i * table.stride_p);
  }
}

// A unit of adjacent pairs, in 16-byte words.
template <typename Rotation, bool INVERSE, int HEADS, typename T, int PAIRS>
__device__ __forceinline__ void turn_adjacent(const T* in, long long head_stride, T* out,
                                              int columns, int heads, const float (&c)[PAIRS],
                                              const float (&s)[PAIRS]) {
  Packed<T> read[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h < heads) read[h] = load_words(in + h * head_stride);
  }
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h >= heads) continue;
    float value[ELEMENTS];
    unpack(read[h], value);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      Rotation::template turn<INVERSE>(value[2 * p], value[2 * p + 1], c[p], s[p]);
    }
    store<true>(out + (long long)h * columns, ELEMENTS, value);
  }
}

// A unit of pairs `apart` columns apart, in 16-byte words.
template <typename Rotation, bool INVERSE, int HEADS, typename T, int PAIRS>
__device__ __forceinline__ void turn_split(const T* in, long long head_stride, T* out, int columns,
                                           int apart, int heads, const float (&c)[PAIRS],
                                           const float (&s)[PAIRS]) {
  Packed<T> low[HEADS], high[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h >= heads) continue;
    low[h] = load_words(in + h * head_stride);
    high[h] = load_words(in + h * head_stride + apart);
  }
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h >= heads) continue;
    float first[ELEMENTS], second[ELEMENTS];
    unpack(low[h], first);
    unpack(high[h], second);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      Rotation::template turn<INVERSE>(first[p], second[p], c[p], s[p]);
    }
    store<true>(out + (long long)h * columns, ELEMENTS, first);
    store<true>(out + (long long)h * columns + apart, ELEMENTS, second);
  }
}

// One pair, columns anywhere.
template <typename Rotation, bool INVERSE, int HEADS, typename T>
__device__ __forceinline__ void turn_pair(const T* in, long long head_stride, long long apart_in,
                                          T* out, int columns, int apart_out, int heads, float c,
                                          float s) {
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h >= heads) continue;
    float first = to_float(in[h * head_stride]);
    float second = to_float(in[h * head_stride + apart_in]);
    Rotation::template turn<INVERSE>(first, second, c, s);
    out[(long long)h * columns] = from_float<T>(first);
    out[(long long)h * columns + apart_out] = from_float<T>(second);
  }
}

// Columns behind the pairs: bits, not numbers.
template <bool VECTOR, int HEADS, typename T>
__device__ __forceinline__ void copy_unit(const T* in, long long head_stride, T* out, int columns,
                                          int heads) {
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h >= heads) continue;
    if (VECTOR) {
      store_words(out + (long long)h * columns, load_words(in + h * head_stride));
    } else {
      out[(long long)h * columns] = in[h * head_stride];
    }
  }
}

// One unit of the heads of one group of one token.
template <typename T, typename Rotation, bool VECTOR, bool INTERLEAVED, bool INVERSE>
__device__ __forceinline__ void turn_unit(const RopeArguments<T>& a, const Heads<T>& x,
                                          long long token, int group, int unit) {
  using U = Unit<VECTOR, INTERLEAVED>;
  // Samples that 32 bits count, as nearly all do, are told apart by a division of 32 bits.
  const bool narrow = (token | a.sequence) >> 32 == 0;
  const long long b = narrow ? (unsigned)token / (unsigned)a.sequence : token / a.sequence;
  const long long s = token - b * a.sequence;
  const int head = group * U::HEADS, heads = min(U::HEADS, x.heads - head);
  const T* in = x.in + b * x.stride_b + s * x.stride_s + head * x.stride_h;
  T* out = x.out + (token * x.heads + head) * a.columns;
  const int turned = a.pairs / U::PAIRS;
  if (unit >= turned) {
    const long long column = 2 * a.pairs + (unit - turned) * U::COLUMNS;
    copy_unit<VECTOR, U::HEADS>(in + column * x.stride_d, x.stride_h, out + column, a.columns,
                                heads);
    return;
  }
  const int pair = unit * U::PAIRS;
  float cosine[U::PAIRS], sine[U::PAIRS];
  load_table(a.cos, b, s, pair, a.table_words, cosine);
  load_table(a.sin, b, s, pair, a.table_words, sine);
  const long long column = INTERLEAVED ? 2LL * pair : pair;
  in += column * x.stride_d;
  out += column;
  if constexpr (VECTOR && INTERLEAVED) {
    turn_adjacent<Rotation, INVERSE, U::HEADS>(in, x.stride_h, out, a.columns, heads, cosine,
                                               sine);
  } else if constexpr (VECTOR) {
    turn_split<Rotation, INVERSE, U::HEADS>(in, x.stride_h, out, a.columns, a.pairs, heads, cosine,
                                            sine);
  } else {
    const int apart = INTERLEAVED ? 1 : a.pairs;
    turn_pair<Rotation, INVERSE, U::HEADS>(in, x.stride_h, apart * x.stride_d, out, a.columns,
                                           apart, heads, cosine[0], sine[0]);
  }
}

// Blocks take turns of `block_tokens` tokens; their threads share groups and units, units
// neighbouring in memory beside each other.
template <typename T, typename Rotation, bool VECTOR, bool INTERLEAVED, bool INVERSE>
__global__ void __launch_bounds__(256) rope(const __grid_constant__ RopeArguments<T> a) {
  const unsigned groups = a.part[0].groups + a.part[1].groups;
  const unsigned work = groups * a.units;
  const long long turns = (a.tokens + a.block_tokens - 1) / a.block_tokens;
  for (long long turn = blockIdx.x; turn < turns; turn += gridDim.x) {
    for (unsigned i = threadIdx.x; i < work * a.block_tokens; i += blockDim.x) {
      const unsigned at = i / work, rest = i - at * work;
      const unsigned group = rest / a.units, unit = rest - group * a.units;
      const long long token = turn * a.block_tokens + at;
      if (token >= a.tokens) break;
      const bool second = group >= a.part[0].groups;
      turn_unit<T, Rotation, VECTOR, INTERLEAVED, INVERSE>(
          a, a.part[second], token, second ? group - a.part[0].groups : group, unit);
    }
  }
}

}  // namespace rlk
