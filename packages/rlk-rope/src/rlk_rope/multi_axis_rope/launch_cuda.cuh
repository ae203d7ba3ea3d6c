// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a call. Everything here may change speed; nothing here can change bits.
#pragma once
#include <type_traits>

#include "rlk_rope/multi_axis_rope/kernel_rope.cuh"
#include "rlk_rope/multi_axis_rope/rotation.cuh"
#include "rlk_rope/multi_axis_rope/rotation_complex_eager.cuh"

namespace rlk {

// 256: threads of a block. Rows of a block depend on the sizes of a token, never on their number.
constexpr int ROPE_THREADS = 256;

inline long long divide_up(long long a, long long b) { return (a + b - 1) / b; }

// What decides the kernel.
struct RopeKind {
  bool interleaved, complex_eager, inverse;
};

// Whether 16-byte words hold whole units of every head. A part without heads is not there.
template <typename T> bool in_words(const RopeArguments<T>& a, bool interleaved) {
  const auto whole = [](long long stride) { return stride * (long long)sizeof(T) % 16 == 0; };
  for (const Heads<T>& x : a.part) {
    if (x.heads == 0) continue;
    if (x.stride_d != 1 || reinterpret_cast<uintptr_t>(x.in) % 16 != 0) return false;
    if (!whole(x.stride_b) || !whole(x.stride_s) || !whole(x.stride_h)) return false;
  }
  return a.columns % ELEMENTS == 0 && (interleaved ? 2 : 1) * a.pairs % ELEMENTS == 0;
}

inline bool table_in_words(const Table& table) {
  return table.stride_p == 1 && table.stride_b % 4 == 0 && table.stride_s % 4 == 0 &&
         reinterpret_cast<uintptr_t>(table.data) % 16 == 0;
}

template <typename T, typename Rotation, bool VECTOR, bool INTERLEAVED, bool INVERSE>
cudaError_t rope_launch(RopeArguments<T> a, cudaStream_t stream) {
  using U = Unit<VECTOR, INTERLEAVED>;
  for (Heads<T>& x : a.part) x.groups = (int)divide_up(x.heads, U::HEADS);
  a.units = a.pairs / U::PAIRS + (a.columns - 2 * a.pairs) / U::COLUMNS;
  a.table_words = table_in_words(a.cos) && table_in_words(a.sin);
  const long long work = (long long)(a.part[0].groups + a.part[1].groups) * a.units;
  // The kernel counts the work of a turn in 32 bits.
  if (work > INT32_MAX) return cudaErrorInvalidValue;
  a.block_tokens = work < ROPE_THREADS ? (int)(ROPE_THREADS / work) : 1;
  const int threads = (int)(32 * divide_up(work * a.block_tokens, 32));
  const long long turns = divide_up(a.tokens, a.block_tokens);
  const int blocks = (int)(turns < INT32_MAX ? turns : INT32_MAX);
  rope<T, Rotation, VECTOR, INTERLEAVED, INVERSE>
      <<<blocks, threads < ROPE_THREADS ? threads : ROPE_THREADS, 0, stream>>>(a);
  return cudaGetLastError();
}

// Call `function` with a constant that is true or false as `value` is.
template <typename Function> cudaError_t by_flag(bool value, Function function) {
  return value ? function(std::true_type()) : function(std::false_type());
}

template <typename T>
cudaError_t rope_by_kind(const RopeArguments<T>& a, const RopeKind& kind, cudaStream_t stream) {
  return by_flag(in_words(a, kind.interleaved), [&](auto vector) {
    return by_flag(kind.interleaved, [&](auto interleaved) {
      return by_flag(kind.inverse, [&](auto inverse) {
        constexpr bool V = decltype(vector)::value, A = decltype(interleaved)::value;
        constexpr bool I = decltype(inverse)::value;
        return kind.complex_eager ? rope_launch<T, ComplexEager, V, A, I>(a, stream)
                                  : rope_launch<T, Separate, V, A, I>(a, stream);
      });
    });
  });
}

// A tensor of a call; without `out` it is not wanted.
template <typename T>
Heads<T> heads_of(const RopeArguments<T>&, const void* in, long long b, long long s, long long h, long long d, void* out,
                  long long heads) {
  return {static_cast<const T*>(in), b, s, h, d, static_cast<T*>(out),
          out == nullptr ? 0 : (int)heads, 0};
}

// Run a call on its device; `fill(arguments)` gives the tensors to be turned.
template <typename Call, typename Fill>
int run_rope(const Call& a, int dtype, bool inverse, Fill fill) {
  DeviceGuard guard(a.device);
  if (guard.error() != cudaSuccess) return guard.error();
  const RopeKind kind{a.interleaved != 0, a.rounding == ROUNDING_COMPLEX_EAGER, inverse};
  return by_dtype(dtype, [&](auto zero) {
    RopeArguments<decltype(zero)> n{};
    n.cos = {static_cast<const float*>(a.cos), a.cos_stride_B, a.cos_stride_S, a.cos_stride_P};
    n.sin = {static_cast<const float*>(a.sin), a.sin_stride_B, a.sin_stride_S, a.sin_stride_P};
    n.tokens = a.B * a.S;
    n.sequence = a.S;
    n.columns = (int)a.D;
    n.pairs = (int)a.P;
    fill(n);
    return rope_by_kind(n, kind, static_cast<cudaStream_t>(a.stream));
  });
}

}  // namespace rlk
