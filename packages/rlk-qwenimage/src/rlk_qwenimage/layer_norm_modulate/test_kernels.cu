// SPDX-License-Identifier: Apache-2.0
// The kernels on the CPU: test_kernels.py.
#include "rlk/test_support/on_host.h"

#include "rlk_qwenimage/layer_norm_modulate/launch_cuda.cuh"

using namespace rlk;

// One call on tensors [T, S, N] and [T, N], elements `apart` from each other where they are read.
struct Call {
    const void *dout, *x, *scale, *shift;
    void *out, *mean, *rstd, *dx, *dscale, *dshift;
    void *workspace;  // null where blocks finish their sums
    long long T, S, N, apart, blocks, parts, per;
    int narrow;  // BF16, not FP32
    float eps;
};

namespace {

template <typename T> Arguments<T> operands(const Call& c) {
    Arguments<T> a{};
    const long long row = c.N * c.apart;
    a.dout = {static_cast<const T*>(c.dout), c.S * row, row, c.apart};
    a.x = {static_cast<const T*>(c.x), c.S * row, row, c.apart};
    a.scale = {c.scale, row, c.apart};
    a.shift = {c.shift, row, c.apart};
    a.mean = {static_cast<float*>(c.mean), c.S, 1};
    a.rstd = {static_cast<float*>(c.rstd), c.S, 1};
    a.out = static_cast<T*>(c.out);
    a.dx = static_cast<T*>(c.dx);
    a.mean_out = static_cast<float*>(c.mean);
    a.rstd_out = static_cast<float*>(c.rstd);
    a.samples = c.T;
    a.tokens = c.S;
    a.columns = (int)c.N;
    a.length = Divisor(a.columns);
    a.eps = c.eps;
    return a;
}

// Run a grid whose blocks get memory full of ones: nothing may count on zeros.
template <typename Body> void run(dim3 blocks, int threads, int bytes, Body body) {
    std::vector<uint4> memory(bytes / sizeof(uint4) + 1, make_uint4(~0u, ~0u, ~0u, ~0u));
    on_host::launched_memory = memory.data();
    on_host::run_grid(blocks, threads, body);
}

int threads_of(long long columns) { return 32 * (int)((columns + CHUNK - 1) / CHUNK); }

template <typename T, bool VECTOR, int THREADS> void forward(const Call& c) {
    const Arguments<T> a = operands<T>(c);
    run(dim3((unsigned)c.blocks), threads_of(c.N), RowSource<T, VECTOR, THREADS>::bytes(),
        [&] { forward_wide<T, VECTOR, THREADS>(a, c.per); });
}

template <typename T, bool VECTOR, int THREADS, Makes MAKES> void backward(const Call& c) {
    Arguments<T> a = operands<T>(c);
    // 64: so that sums alone take several slices, the last of which has warps without columns.
    const int threads = MAKES == Makes::kSums ? min(threads_of(c.N), 64) : threads_of(c.N);
    const unsigned slices = (unsigned)((c.N + threads * ELEMENTS - 1) / (threads * ELEMENTS));
    a.dscale = static_cast<T*>(c.dscale);
    a.dshift = static_cast<T*>(c.dshift);
    const int bytes = 2 * Deeper::bytes(threads) + TokenSource<T, VECTOR, THREADS>::bytes();
    const int sums = (c.dscale != nullptr) + (c.dshift != nullptr);
    const bool shared = c.workspace != nullptr && sums > 0;
    const JointSums joint(c.workspace, c.N, shared ? sums : 0, c.parts);
    const long long doubles = joint.doubles(c.T);
    if (shared) {
        const long long zeros = ceil_divide(doubles, ZERO_THREADS * ZERO_STORES);
        on_host::run_grid(dim3((unsigned)zeros), ZERO_THREADS,
                          [&] { store_zeros(reinterpret_cast<long long*>(joint.levels), doubles); });
    }
    const Division division{0, (int)c.T, (int)c.parts, (int)c.per};
    run(dim3((unsigned)c.blocks, slices), threads, bytes,
        [&] { backward_wide<T, VECTOR, THREADS, MAKES>(a, division, joint); });
    if (!shared) return;
    on_host::run_grid(dim3((unsigned)(joint.columns / CHUNK), (unsigned)(c.T * sums)),
                      ROUND_THREADS, [&] { round_sums<T>(a, joint, division.first); });
}

template <typename T, bool VECTOR, int THREADS> void run_kernel(const Call& c, bool is_forward) {
    if (is_forward) return forward<T, VECTOR, THREADS>(c);
    if (c.dx == nullptr) return backward<T, VECTOR, THREADS, Makes::kSums>(c);
    const bool rows = c.dscale == nullptr && c.dshift == nullptr;
    if (rows) return backward<T, VECTOR, THREADS, Makes::kRows>(c);
    backward<T, VECTOR, THREADS, Makes::kAll>(c);
}

// Of the kernels that serve rows of up to 3072 columns, those that differ in more than numbers.
template <typename T> void by_strides(const Call& c, bool is_forward) {
    const bool vector = c.apart == 1 && c.N % ELEMENTS == 0;
    if (!vector) return run_kernel<T, false, 256>(c, is_forward);
    if (sizeof(T) == 2 && c.N > 8 * CHUNK) return run_kernel<__nv_bfloat16, true, 384>(c, is_forward);
    run_kernel<T, true, 256>(c, is_forward);
}

// The levels of one thread, which has added turns of terms [rows][ELEMENTS], as digits.
template <int BITS> uint32_t sum_turns(const float* terms, long long rows, ExactState state) {
    threadIdx = dim3(0);
    blockDim = dim3(1);
    std::vector<double> shared(Deeper::bytes(1) / sizeof(double) + 1, NAN);
    const Deeper deeper(shared.data(), 0);
    TokenSums<BITS> sums;
    sums.clear(ELEMENTS);
    deeper.clear();
    for (long long row = 0; row < rows; row += TURN) {
        float turn[TURN][ELEMENTS] = {};
        const int count = (int)min(rows - row, (long long)TURN);
        std::copy_n(terms + row * ELEMENTS, count * ELEMENTS, &turn[0][0]);
        sums.add_turn(turn, count, shared.data(), 0);
    }
    for (int i = 0; i < ELEMENTS; ++i) {
        state.add_exact(i, sums.level[i]);
        for (int d = 1; d < LEVELS; ++d) state.add_exact(i, deeper.at(d, i));
    }
    return deeper.found->bits;
}

}  // namespace

// The state [13, 8] of terms [rows, 8], of so many significant bits; what was found besides.
extern "C" uint32_t sum_terms(const float* terms, long long rows, int bits, long long* digits) {
    const ExactState state{digits, ELEMENTS};
    return bits == 24 ? sum_turns<24>(terms, rows, state) : sum_turns<8>(terms, rows, state);
}

extern "C" void run_call(const Call* c, int is_forward) {
    c->narrow ? by_strides<__nv_bfloat16>(*c, is_forward) : by_strides<float>(*c, is_forward);
}

// The backward of FP32 tensors as it is launched, or with `workspace` the bytes that it takes.
extern "C" int launch_backward(const Call* c, long long* workspace) {
    Arguments<float> a = operands<float>(*c);
    a.dscale = static_cast<float*>(c->dscale);
    a.dshift = static_cast<float*>(c->dshift);
    return backward(a, c->workspace, 0, nullptr, workspace);
}
