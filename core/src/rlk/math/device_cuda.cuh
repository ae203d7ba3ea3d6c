// SPDX-License-Identifier: Apache-2.0
// FP32 functions in CUDA, operation by operation as in golden.py. Every operation is an
// intrinsic with its rounding written out: bare `*` and `+` may be fused after PTX.
#pragma once
#include <stdint.h>

namespace rlk {

// Constants have their reasons in golden.py; a test holds the two files to the same values.
constexpr float LOG2_E = 0x1.715476p+0f;
constexpr float LN2_HIGH = 0x1.62e430p-1f;
constexpr float LN2_LOW = -0x1.05c610p-29f;
constexpr float ROUND_TO_INTEGER = 12582912.0f + 254.0f;
constexpr float EXP_C6 = 0x1.6ac74ep-10f;
constexpr float EXP_C5 = 0x1.123de0p-7f;
constexpr float EXP_C4 = 0x1.555858p-5f;
constexpr float EXP_C3 = 0x1.55548cp-3f;
constexpr float EXP_C2 = 0x1.fffffcp-2f;
constexpr float EXP_HIGHEST = 89.0f;
constexpr float EXP_LOWEST = -104.0f;

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float subtract(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float sqrt(float x) { return __fsqrt_rn(x); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }

// A divisor of many quotients. A power of two has an exact inverse, and the product with it is the
// same real number as the quotient, so it rounds to the same bits.
struct Divisor {
  float value;
  float inverse;  // 0 if it is not exact

  __host__ __device__ Divisor(int count = 1)
      : value((float)count), inverse((count & (count - 1)) == 0 ? 1.0f / (float)count : 0.0f) {}
};

__device__ __forceinline__ float divide(float a, Divisor by) {
  return by.inverse != 0.0f ? multiply(a, by.inverse) : divide(a, by.value);
}

// 1 / x, rounded once: the same bits as divide(1, x).
__device__ __forceinline__ float reciprocal(float x) { return __frcp_rn(x); }

// 1 / sqrt(x) to about 1 ulp, as NVIDIA's instruction gives it: no IEEE operation. Sources that use
// it say so to check_ptx.
__device__ __forceinline__ float hardware_rsqrt(float x) {
  float root;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

__device__ __forceinline__ float negate(float x) {
  return __uint_as_float(__float_as_uint(x) ^ 0x80000000u);
}

// e^(x - n ln 2), the polynomial of golden.py.
__device__ __forceinline__ float exp_remainder(float x, float n) {
  float r = fma(n, -LN2_HIGH, x);
  r = fma(n, -LN2_LOW, r);
  float p = fma(r, EXP_C6, EXP_C5);
  p = fma(p, r, EXP_C4);
  p = fma(p, r, EXP_C3);
  p = fma(p, r, EXP_C2);
  p = fma(p, r, 1.0f);
  return fma(p, r, 1.0f);
}

// e^x to 1 ulp over all of FP32.
__device__ __forceinline__ float exp(float x) {
  const float rounded = fma(x, LOG2_E, ROUND_TO_INTEGER);
  const float n = subtract(rounded, ROUND_TO_INTEGER);
  const float p = exp_remainder(x, n);
  const int exponent = __float_as_int(rounded);
  const int half = exponent >> 1;
  float y = multiply(p, __uint_as_float((uint32_t)half << 23));
  y = multiply(y, __uint_as_float((uint32_t)(exponent - half) << 23));
  y = x > EXP_HIGHEST ? __uint_as_float(0x7f800000u) : y;
  return x < EXP_LOWEST ? 0.0f : y;
}

// The smaller or larger of two numbers; NaN if one is, unlike fminf and fmaxf.
__device__ __forceinline__ float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// -87: below it e^x vanishes beside 1, and above it the exponent field of e^x / 2 is a normal one.
constexpr float SIGMOID_LOWEST = -87.0f;

// 1 + e^-x with the bits of add(1, exp(negate(x))), in fewer steps: one scaling by 2^(n - 1),
// whose doubling is exact, and a clamp for both ends, which only changes terms that 1 absorbs.
// `-x` is PTX's neg, a flip of the sign bit that costs nothing as an operand.
__device__ __forceinline__ float one_plus_exp_negated(float x) {
  const float t = minimum(maximum(-x, SIGMOID_LOWEST), EXP_HIGHEST);
  // 126: the bias less the halving, so that n + 126 in the low bits is an exponent field.
  const float magic = 12582912.0f + 126.0f;
  const float rounded = fma(t, LOG2_E, magic);
  const float n = subtract(rounded, magic);
  const float p = exp_remainder(t, n);
  const float half = multiply(p, __uint_as_float(__float_as_uint(rounded) << 23));
  return fma(2.0f, half, 1.0f);
}

// 1 / (1 + e^-x)
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(one_plus_exp_negated(x)); }

// 1 / d with the bits of reciprocal(d) where 2^-100 < d < 2^126: an estimate and one Newton step,
// as hardware division takes them, without the test of the range before each.
// check_ptx: allow rcp.approx.ftz.f32 (the step rounds it correctly; a test holds all d to it)
__device__ __forceinline__ float reciprocal_in_range(float d) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(d));
  return fma(estimate, fma(-d, estimate, 1.0f), estimate);
}

// 1 / sqrt(x) with the bits of reciprocal(sqrt(x)). One test of the range serves both operations,
// which are taken there as hardware takes them.
// check_ptx: allow rsqrt.approx.ftz.f32 (a step rounds it correctly; a test holds all x to it)
__device__ __forceinline__ float reciprocal_root(float x) {
  if (x >= 0x1p-100f && x <= 0x1p100f) {
    float estimate;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
    const float root = multiply(x, estimate), rest = fma(-root, root, x);
    return reciprocal_in_range(fma(rest, multiply(0.5f, estimate), root));
  }
  return reciprocal(sqrt(x));
}

// 1 + e^-x with the bits of one_plus_exp_negated where |x| < 87: there 2^n and p * 2^n are normal
// numbers, so that scaling and adding are one exact product and one rounding.
__device__ __forceinline__ float one_plus_exp_negated_near(float x) {
  const float magic = 12582912.0f + 127.0f;
  const float rounded = fma(-x, LOG2_E, magic);
  const float n = subtract(rounded, magic);
  return fma(exp_remainder(-x, n), __uint_as_float(__float_as_uint(rounded) << 23), 1.0f);
}

// Sigmoids of any values. A function of its own, so that loops that seldom call it stay short.
template <int N> struct Values {
  float at[N];
};
template <int N> __device__ __noinline__ Values<N> called_sigmoids(Values<N> x) {
#pragma unroll 1
  for (int i = 0; i < N; ++i) x.at[i] = sigmoid(x.at[i]);
  return x;
}
template <int N> __device__ __forceinline__ void far_sigmoids(const float (&x)[N], float (&s)[N]) {
  Values<N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) values.at[i] = x[i];
  values = called_sigmoids(values);
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = values.at[i];
}

// Sigmoids of a lane's values, each with the bits of sigmoid(x). One test of the range serves all,
// so that no branch stands between their chains of operations.
template <int N> __device__ __forceinline__ void sigmoids(const float (&x)[N], float (&s)[N]) {
  bool near = true;
#pragma unroll
  for (int i = 0; i < N; ++i) near &= fabsf(x[i]) < -SIGMOID_LOWEST;
  if (near) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = reciprocal_in_range(one_plus_exp_negated_near(x[i]));
  } else {
    far_sigmoids(x, s);
  }
}

// x * s with s = sigmoid(x)
__device__ __forceinline__ float silu(float x, float s) { return multiply(x, s); }

// s * (1 - s) with s = sigmoid(x)
__device__ __forceinline__ float sigmoid_derivative(float s) {
  return multiply(s, subtract(1.0f, s));
}

// s * (1 + x * (1 - s)) with s = sigmoid(x)
__device__ __forceinline__ float silu_derivative(float x, float s) {
  return multiply(s, add(1.0f, multiply(x, subtract(1.0f, s))));
}

}  // namespace rlk
