// SPDX-License-Identifier: Apache-2.0
// The kernel of both operators: each thread turns columns of one token, of a head by
// words, of a few heads by elements.
#pragma once
#include "rlk/cuda/rows.cuh"

namespace rlk {

// 128: threads of a block. Small blocks spread few tokens over all multiprocessors.
constexpr int ROPE_THREADS = 128;

// Divides numbers below 2^31 by one that is known at the launch: one product instead of some
// forty instructions. factor = ceil(2^(31 + shift) / value) with 2^shift >= value exceeds the
// quotient by less than value / 2^(31 + shift) of the number, too little to reach the next.
struct Divisor {
  unsigned value, factor, shift;

  __device__ __forceinline__ unsigned quotient(unsigned number) const {
    return __umulhi(number << 1, factor) >> shift;
  }
};

// One of the tensors of a launch, [B, S, heads, columns]; strides in elements, `out` contiguous.
template <typename T> struct Heads {
  const T* in;
  long long stride_b, stride_s, stride_h, stride_d;
  T* out;
  unsigned heads;
  unsigned groups;  // of heads, one for each thread
};

// FP32 [B, S, P], P = pairs.
struct Table {
  const float* data;
  long long stride_b, stride_s, stride_p;
};

// Work is counted unit by unit, group by group, token by token: what lies beside each other in
// memory is the work of threads beside each other.
template <typename T, int PARTS> struct RopeArguments {
  Heads<T> part[PARTS];
  Table cos, sin;
  long long samples, sequence;
  unsigned columns, pairs;
  unsigned turned;        // units of a head, the first; others are copied
  unsigned copied_apart;  // columns between the two runs of a unit that is copied
  unsigned work;          // below 2^31
  Divisor by_units, by_groups, by_sequence;
};

// A unit of a head is one run of neighbouring columns, or two runs apart. A thread loads it of
// HEADS heads before it turns any.
template <bool VECTOR, bool INTERLEAVED> struct Unit {
  static constexpr int RUNS = VECTOR && INTERLEAVED ? 1 : 2;
  static constexpr int COLUMNS = VECTOR ? ELEMENTS : 1;  // of a run
  static constexpr int PAIRS = RUNS * COLUMNS / 2;
  static constexpr int HEADS = VECTOR ? 1 : 4;
};

// A run as it lies in memory: eight columns in 16-byte words, or one anywhere.
template <typename T, bool VECTOR> struct Run {
  Packed<T> packed;

  __device__ __forceinline__ void load(const T* from) {
    uint4* words = reinterpret_cast<uint4*>(&packed);
#pragma unroll
    for (int i = 0; i < Packed<T>::WORDS; ++i) {
      words[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    }
  }
  // Loads and stores without hints: those of streams take longer here.
  __device__ __forceinline__ void store(T* at) const {
    const uint4* words = reinterpret_cast<const uint4*>(&packed);
#pragma unroll
    for (int i = 0; i < Packed<T>::WORDS; ++i) reinterpret_cast<uint4*>(at)[i] = words[i];
  }
  __device__ __forceinline__ void to_floats(float (&out)[ELEMENTS]) const { unpack(packed, out); }
  __device__ __forceinline__ void from_floats(const float (&in)[ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) packed.value[i] = from_float<T>(in[i]);
  }
};

template <typename T> struct Run<T, false> {
  T value;

  __device__ __forceinline__ void load(const T* from) { value = *from; }
  __device__ __forceinline__ void store(T* at) const { *at = value; }
  __device__ __forceinline__ void to_floats(float (&out)[1]) const { out[0] = to_float(value); }
  __device__ __forceinline__ void from_floats(const float (&in)[1]) {
    value = from_float<T>(in[0]);
  }
};

template <bool WORDS, int PAIRS>
__device__ __forceinline__ void load_table(const Table& table, unsigned b, unsigned s,
                                           unsigned pair, float (&out)[PAIRS]) {
  const long long stride_p = WORDS ? 1 : table.stride_p;
  const float* at = table.data + b * table.stride_b + s * table.stride_s + pair * stride_p;
  if (WORDS) {
#pragma unroll
    for (int i = 0; i < PAIRS / 4; ++i) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(at) + i);
      out[4 * i] = four.x, out[4 * i + 1] = four.y;
      out[4 * i + 2] = four.z, out[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) out[i] = __ldg(at + i * stride_p);
  }
}

// The pairs of a unit: neighbours in its one run, or one of each of its two.
template <typename Rotation, bool INVERSE, int RUNS, int PAIRS, typename Run>
__device__ __forceinline__ void turn_unit(Run (&run)[RUNS], const float (&c)[PAIRS],
                                          const float (&s)[PAIRS]) {
  float value[RUNS][2 * PAIRS / RUNS];
#pragma unroll
  for (int r = 0; r < RUNS; ++r) run[r].to_floats(value[r]);
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    float& first = RUNS == 1 ? value[0][2 * p] : value[0][p];
    float& second = RUNS == 1 ? value[0][2 * p + 1] : value[RUNS - 1][p];
    Rotation::template turn<INVERSE>(first, second, c[p], s[p]);
  }
#pragma unroll
  for (int r = 0; r < RUNS; ++r) run[r].from_floats(value[r]);
}

// One thread, one unit of the heads of one group of one token. Units that are turned and units that
// are copied take the same way through memory: a warp has both, and waits once.
template <typename T, int PARTS, typename Rotation, bool VECTOR, bool TABLE_WORDS, bool INTERLEAVED,
          bool INVERSE>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope(const __grid_constant__ RopeArguments<T, PARTS> a) {
  using U = Unit<VECTOR, INTERLEAVED>;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.work) return;
  const unsigned row = a.by_units.quotient(i), unit = i - row * a.by_units.value;
  const unsigned token = a.by_groups.quotient(row);
  unsigned group = row - token * a.by_groups.value;
  const unsigned b = a.by_sequence.quotient(token), s = token - b * a.by_sequence.value;
  const bool second = PARTS == 2 && group >= a.part[0].groups;
  const Heads<T>& x = a.part[second];
  if (second) group -= a.part[0].groups;

  const bool turned = unit < a.turned;
  const unsigned column = turned ? (INTERLEAVED ? 2 * U::PAIRS : U::COLUMNS) * unit
                                 : 2 * a.pairs + U::COLUMNS * (unit - a.turned);
  const unsigned apart = !turned ? a.copied_apart : INTERLEAVED ? 1 : a.pairs;
  // Runs that are copied may be odd in number.
  const bool two = U::RUNS == 2 && column + apart < a.columns;
  const long long stride_d = VECTOR ? 1 : x.stride_d;
  const unsigned head = group * U::HEADS;
  const T* in = x.in + b * x.stride_b + s * x.stride_s + head * x.stride_h + column * stride_d;
  T* out = x.out + ((unsigned long long)token * x.heads + head) * a.columns + column;

  Run<T, VECTOR> run[U::HEADS][U::RUNS];
#pragma unroll
  for (int h = 0; h < U::HEADS; ++h) {
    if (head + h >= x.heads) continue;
    run[h][0].load(in + h * x.stride_h);
    if (two) run[h][U::RUNS - 1].load(in + h * x.stride_h + apart * stride_d);
  }
  if (turned) {
    float cosine[U::PAIRS], sine[U::PAIRS];
    load_table<TABLE_WORDS>(a.cos, b, s, unit * U::PAIRS, cosine);
    load_table<TABLE_WORDS>(a.sin, b, s, unit * U::PAIRS, sine);
#pragma unroll
    for (int h = 0; h < U::HEADS; ++h) turn_unit<Rotation, INVERSE>(run[h], cosine, sine);
  }
#pragma unroll
  for (int h = 0; h < U::HEADS; ++h) {
    if (head + h >= x.heads) continue;
    run[h][0].store(out + h * a.columns);
    if (two) run[h][U::RUNS - 1].store(out + h * a.columns + apart);
  }
}

}  // namespace rlk
