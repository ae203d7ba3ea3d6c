// SPDX-License-Identifier: Apache-2.0
// The launcher and the kernel in FP32 on the CPU: test_kernel_rope.py.
#include "rlk/test_support/on_host.h"

enum { ROUNDING_COMPLEX_EAGER = 1 };
#include "rlk_rope/multi_axis_rope/launch_cuda.cuh"

using namespace rlk;

// Two tensors, of which either may have no heads; sizes B, S, D, P.
extern "C" int turn_both(const float* const* in, float* const* out, const long long (*strides)[4],
                         const long long* heads, const float* const* tables,
                         const long long (*table_strides)[3], const long long* sizes,
                         const int* kind, long long limit) {
    RopeArguments<float, 2> a{};
    a.samples = sizes[0], a.sequence = sizes[1], a.columns = sizes[2], a.pairs = sizes[3];
    for (int i = 0; i < 2; ++i) {
        const long long* of = strides[i];
        a.part[i] = heads_of(a, in[i], of[0], of[1], of[2], of[3], out[i], heads[i]);
        const long long* by = table_strides[i];
        (i == 0 ? a.cos : a.sin) = {tables[i], by[0], by[1], by[2]};
    }
    return rope_by_kind(a, {kind[0] != 0, kind[1] != 0, kind[2] != 0}, nullptr, limit);
}

// Of numbers below 2^31 and all divisors below `end`, and of powers of two and what lies around
// them, the first divisor with a wrong quotient; 0 if there is none.
extern "C" long long wrong_divisor(unsigned end) {
    const auto wrong = [](unsigned value) {
        const Divisor by = divisor(value);
        const unsigned last = INT32_MAX, most = last / value;
        for (unsigned q : {0u, 1u, 2u, most / 3, most / 2, most - (most > 0), most}) {
            for (int side = -1; side <= 1; ++side) {
                const long long number = (long long)q * value + side;
                if (number < 0 || number > last) continue;
                if (by.quotient((unsigned)number) != number / value) return true;
            }
        }
        return by.quotient(last) != last / value;
    };
    for (unsigned value = 1; value < end; ++value) {
        if (wrong(value)) return value;
    }
    for (int power = 1; power < 32; ++power) {
        for (long long side = -3; side <= 3; ++side) {
            const long long value = (1LL << power) + side;
            if (value >= 1 && value <= INT32_MAX && wrong((unsigned)value)) return value;
        }
    }
    return 0;
}
