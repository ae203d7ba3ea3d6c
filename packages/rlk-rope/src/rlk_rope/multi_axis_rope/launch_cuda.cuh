// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a call. Everything here may change speed; nothing here can change bits.
#pragma once
#include <type_traits>

#include "rlk_rope/multi_axis_rope/kernel_rope.cuh"
#include "rlk_rope/multi_axis_rope/rotation.cuh"
#include "rlk_rope/multi_axis_rope/rotation_complex_eager.cuh"

namespace rlk {

inline long long divide_up(long long a, long long b) { return (a + b - 1) / b; }

// For a value from 1 to 2^31 - 1.
inline Divisor divisor(unsigned value) {
  unsigned shift = 0;
  while (1ULL << shift < value) ++shift;
  return {value, (unsigned)(((1ULL << (31 + shift)) + value - 1) / value), shift};
}

// What decides the kernel.
struct RopeKind {
  bool interleaved, complex_eager, inverse;
};

// Whether 16-byte words hold whole units of every head. A part without heads is not there.
template <typename T, int PARTS>
bool in_words(const RopeArguments<T, PARTS>& a, bool interleaved) {
  const auto whole = [](long long stride) { return stride * (long long)sizeof(T) % 16 == 0; };
  for (const Heads<T>& x : a.part) {
    if (x.heads == 0) continue;
    if (x.stride_d != 1 || reinterpret_cast<uintptr_t>(x.in) % 16 != 0) return false;
    if (!whole(x.stride_b) || !whole(x.stride_s) || !whole(x.stride_h)) return false;
  }
  return a.columns % ELEMENTS == 0 && (interleaved ? 2 : 1) * a.pairs % ELEMENTS == 0;
}

inline bool in_words(const Table& table) {
  return table.stride_p == 1 && table.stride_b % 4 == 0 && table.stride_s % 4 == 0 &&
         reinterpret_cast<uintptr_t>(table.data) % 16 == 0;
}

// Leaves out the first samples, or the first tokens of the only one.
template <typename T, int PARTS>
void skip(RopeArguments<T, PARTS>& a, bool of_samples, long long count) {
  const auto of = [=](const auto& x) { return count * (of_samples ? x.stride_b : x.stride_s); };
  for (Heads<T>& x : a.part) {
    x.in += of(x);
    x.out += count * (of_samples ? a.sequence : 1) * x.heads * a.columns;
  }
  a.cos.data += of(a.cos);
  a.sin.data += of(a.sin);
  (of_samples ? a.samples : a.sequence) -= count;
}

// One launch, or those of both halves where there is more work than `limit`.
template <typename T, int PARTS, typename Rotation, bool VECTOR, bool TABLE_WORDS, bool INTERLEAVED,
          bool INVERSE>
cudaError_t rope_launch(RopeArguments<T, PARTS> a, cudaStream_t stream, long long limit) {
  using U = Unit<VECTOR, INTERLEAVED>;
  long long groups = 0;
  for (Heads<T>& x : a.part) groups += x.groups = (unsigned)divide_up(x.heads, U::HEADS);
  const long long copied = divide_up((a.columns - 2 * a.pairs) / U::COLUMNS, U::RUNS);
  a.turned = a.pairs / U::PAIRS;
  a.copied_apart = (unsigned)copied * U::COLUMNS;
  const long long units = a.turned + copied, work = a.samples * a.sequence * groups * units;
  if (work == 0) return cudaSuccess;
  if (work > limit) {
    const bool of_samples = a.samples > 1;
    const long long count = of_samples ? a.samples : a.sequence;
    if (count == 1) return cudaErrorInvalidValue;
    RopeArguments<T, PARTS> second = a;
    skip(second, of_samples, count / 2);
    (of_samples ? a.samples : a.sequence) = count / 2;
    const auto launch =
        rope_launch<T, PARTS, Rotation, VECTOR, TABLE_WORDS, INTERLEAVED, INVERSE>;
    const cudaError_t error = launch(a, stream, limit);
    return error == cudaSuccess ? launch(second, stream, limit) : error;
  }
  a.work = (unsigned)work;
  a.by_units = divisor((unsigned)units);
  a.by_groups = divisor((unsigned)groups);
  a.by_sequence = divisor((unsigned)a.sequence);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((unsigned)divide_up(work, ROPE_THREADS));
  config.blockDim = dim3(ROPE_THREADS);
  config.stream = stream;
  return cudaLaunchKernelEx(
      &config, rope<T, PARTS, Rotation, VECTOR, TABLE_WORDS, INTERLEAVED, INVERSE>, a);
}

// Call `function` with a constant that is true or false as `value` is.
template <typename Function> cudaError_t by_flag(bool value, Function function) {
  return value ? function(std::true_type()) : function(std::false_type());
}

// `limit`: of the work of a launch; the kernel counts no more.
template <typename T, int PARTS>
cudaError_t rope_by_kind(const RopeArguments<T, PARTS>& a, const RopeKind& kind,
                         cudaStream_t stream, long long limit = INT32_MAX) {
  const bool table_words = in_words(a.cos) && in_words(a.sin);
  return by_flag(in_words(a, kind.interleaved), [&](auto vector) {
    return by_flag(table_words, [&](auto words) {
      return by_flag(kind.interleaved, [&](auto interleaved) {
        return by_flag(kind.inverse, [&](auto inverse) {
          constexpr bool V = decltype(vector)::value, W = V && decltype(words)::value;
          constexpr bool A = decltype(interleaved)::value, I = decltype(inverse)::value;
          return kind.complex_eager
                     ? rope_launch<T, PARTS, ComplexEager, V, W, A, I>(a, stream, limit)
                     : rope_launch<T, PARTS, Separate, V, W, A, I>(a, stream, limit);
        });
      });
    });
  });
}

// A tensor of a call; without `out` it is not wanted.
template <typename T, int PARTS>
Heads<T> heads_of(const RopeArguments<T, PARTS>&, const void* in, long long b, long long s,
                  long long h, long long d, void* out, long long heads) {
  return {static_cast<const T*>(in), b, s, h, d, static_cast<T*>(out),
          out == nullptr ? 0 : (unsigned)heads, 0};
}

// Run a call on its device; `fill(arguments)` gives the tensors to be turned, PARTS of them.
template <int PARTS, typename Call, typename Fill>
int run_rope(const Call& a, int dtype, bool inverse, Fill fill) {
  DeviceGuard guard(a.device);
  if (guard.error() != cudaSuccess) return guard.error();
  const RopeKind kind{a.interleaved != 0, a.rounding == ROUNDING_COMPLEX_EAGER, inverse};
  return by_dtype(dtype, [&](auto zero) {
    RopeArguments<decltype(zero), PARTS> n{};
    n.cos = {static_cast<const float*>(a.cos), a.cos_stride_B, a.cos_stride_S, a.cos_stride_P};
    n.sin = {static_cast<const float*>(a.sin), a.sin_stride_B, a.sin_stride_S, a.sin_stride_P};
    n.samples = a.B;
    n.sequence = a.S;
    n.columns = (unsigned)a.D;
    n.pairs = (unsigned)a.P;
    fill(n);
    return rope_by_kind(n, kind, static_cast<cudaStream_t>(a.stream));
  });
}

}  // namespace rlk
