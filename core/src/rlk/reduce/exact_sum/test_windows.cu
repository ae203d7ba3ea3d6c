// SPDX-License-Identifier: Apache-2.0
// Sums by windows, and both passes of a column sum, on the CPU: test_windows.py.
#include "rlk/test_support/on_host.h"

#include "rlk/reduce/exact_sum/device_rows.cuh"
#include "rlk/reduce/exact_sum/kernel_combine.cuh"
#include "rlk/reduce/exact_sum/window_cuda.cuh"

using namespace rlk;

namespace {

// 8: columns of a thread.
constexpr int COLUMNS = 8;

struct Input {
    const float* terms;  // [rows][columns]
    long long rows, columns;

    void row(long long row, long long column, float (&out)[COLUMNS]) const {
        for (int i = 0; i < COLUMNS; ++i) {
            const bool inside = row < rows && column + i < columns;
            out[i] = inside ? terms[row * columns + column + i] : 0.0f;
        }
    }
};

void normalise(ExactState state) {
    for (long long column = 0; column < state.columns; ++column) {
        long long limb[LIMBS];
        for (int i = 0; i < LIMBS; ++i) limb[i] = state.data[i * state.columns + column];
        normalise_limbs(limb);
        for (int i = 0; i < LIMBS; ++i) state.data[i * state.columns + column] = limb[i];
    }
}

// All rows by one thread, TOGETHER at a time.
template <int TOGETHER> void sum_alone(Input in, ExactState state) {
    std::vector<double> shared(WindowSums<COLUMNS>::doubles(1), NAN);
    threadIdx = dim3(0);
    WindowSums<COLUMNS> sums;
    sums.clear(shared.data(), 1);
    for (long long row = 0; row < in.rows; row += TOGETHER) {
        float terms[TOGETHER][COLUMNS];
        for (int u = 0; u < TOGETHER; ++u) in.row(row + u, 0, terms[u]);
        sums.add(terms, state, 0);
    }
    sums.flush(state, 0);
}

// What the threads of a block do with their rows: a group of LANES threads one row at a time, and
// two of them before the sums are looked at.
template <int LANES, int THREADS>
void add_rows(Input in, WindowSums<COLUMNS>& sums, ExactState rest, long long first, int place) {
    constexpr int GROUPS = THREADS / LANES;
    const long long step = (long long)GROUPS * gridDim.x;
    for (long long row = blockIdx.x * GROUPS + threadIdx.x / LANES; row < in.rows; row += 2 * step) {
        sums.template make_room<2>(rest, place);
        float terms[2][COLUMNS];
        for (int u = 0; u < 2; ++u) in.row(row + u * step, first + place, terms[u]);
        sums.add_rows(terms, rest, place);
    }
}

// As `backward_narrow`: groups of LANES threads have the same columns, chunks of 256 are blocks.
template <int LANES, int THREADS> void narrow(Input in, int blocks, SumResult result) {
    constexpr int WIDTH = LANES * COLUMNS;
    // All bits set: nothing may count on zeros.
    std::vector<char> workspace(Partials::bytes(blocks, in.columns, true), (char)255);
    const Partials partials(workspace.data(), blocks, in.columns, true);
    std::vector<double> shared(WindowSums<COLUMNS>::doubles(THREADS), NAN);
    std::vector<double> staged(WindowSums<COLUMNS>::staged_doubles(THREADS), NAN);
    std::vector<long long> kept(STATE_ROWS * WIDTH, -1);
    on_host::run_grid(dim3(blocks, (in.columns + 255) / 256), THREADS, [&] {
        const long long first = blockIdx.y * 256;
        const int place = threadIdx.x % LANES * COLUMNS;
        const ExactState rest{kept.data(), WIDTH};
        WindowSums<COLUMNS> sums;
        sums.clear(shared.data(), THREADS);
        for (int i = threadIdx.x; i < STATE_ROWS * WIDTH; i += THREADS) rest.data[i] = 0;
        __syncthreads();
        add_rows<LANES, THREADS>(in, sums, rest, first, place);
        __syncthreads();
        const Merged merged = sums.merge<LANES, THREADS>(rest, staged.data());
        if (gridDim.x > 1) {
            merged.store<WIDTH, THREADS>(partials, rest, first);
        } else if (threadIdx.x < WIDTH && first + threadIdx.x < in.columns) {
            store_pair(result, first + threadIdx.x, merged.sum, !merged.left, rest, threadIdx.x);
        }
    });
    if (blocks > 1) launch_combine(partials, blocks, result, 0, nullptr);
}

// As `backward_wide`: a block has all columns of its rows, and adds to the state what is deep.
void wide(Input in, int blocks, SumResult result) {
    const ExactState state = result.state;
    const int threads = 32 * (int)((in.columns + 255) / 256);
    std::vector<char> workspace(Partials::bytes(blocks, in.columns, false), (char)255);
    const Partials partials(workspace.data(), blocks, in.columns, false);
    std::vector<double> shared(WindowSums<COLUMNS>::doubles(threads), NAN);
    std::fill_n(state.data, STATE_ROWS * state.columns, 0);
    on_host::run_grid(dim3(blocks), threads, [&] {
        const long long column = threadIdx.x * COLUMNS;
        WindowSums<COLUMNS> sums;
        sums.clear(shared.data(), threads);
        for (long long row = blockIdx.x; row < in.rows && column < in.columns; row += gridDim.x) {
            float terms[1][COLUMNS];
            in.row(row, column, terms[0]);
            sums.add(terms, state, column);
        }
        sums.store(partials, state, column);
    });
    launch_combine(partials, blocks, result, 0, nullptr);
}

}  // namespace

// state [13, columns] is the sum of terms [rows, columns], 8 columns; `kind` as in test_windows.py.
extern "C" void sum_by_one_thread(const float* terms, long long rows, int kind, long long* data) {
    const Input in{terms, rows, COLUMNS};
    const ExactState state{data, COLUMNS};
    if (kind == 0) sum_alone<1>(in, state);
    if (kind == 1) sum_alone<2>(in, state);
    if (kind == 2) sum_alone<4>(in, state);
    normalise(state);
}

// The same of any columns, by two passes, or by one of one block, in the form that is asked for.
extern "C" void sum_by_passes(const float* terms, long long rows, long long columns, int lanes,
                              int threads, int blocks, long long* data, void* sums, int dtype,
                              int form) {
    const Input in{terms, rows, columns};
    const SumResult result{{data, columns}, sums, dtype, form};
    if (lanes == 16 && threads == 256) narrow<16, 256>(in, blocks, result);
    if (lanes == 32 && threads == 256) narrow<32, 256>(in, blocks, result);
    if (lanes == 16 && threads == 512) narrow<16, 512>(in, blocks, result);
    if (lanes == 32 && threads == 512) narrow<32, 512>(in, blocks, result);
    if (lanes == 0) wide(in, blocks, result);
}

// The same by one thread for each column.
extern "C" void sum_few(const float* terms, long long rows, long long columns, long long* data,
                        void* sums, int dtype, int form) {
    constexpr int THREADS = 64;
    std::vector<double> shared(few_rows_bytes<THREADS>() / sizeof(double), NAN);
    const int blocks = (int)((columns + THREADS - 1) / THREADS);
    on_host::run_grid(dim3(blocks), THREADS, [&] {
        const long long column = (long long)blockIdx.x * THREADS + threadIdx.x;
        if (column >= columns) return;
        sum_few_rows<THREADS>(Rows<float>{terms, columns, 1}, rows, column, shared.data(),
                              {{data, columns}, sums, dtype, form});
    });
}
