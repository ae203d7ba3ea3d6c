// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a call. Everything here may change speed; nothing here can change bits.
#pragma once
#include "rlk/cuda/grid.cuh"
#include "rlk_qwenimage/layer_norm_modulate/kernel_backward.cuh"

namespace rlk {

// 2: tokens of a block that shares a sample, at least: a turn.
constexpr long long LEAST_TOKENS = 2;
// 4: turns that last as long as the second pass, or as the launch of another grid.
constexpr long long LAUNCH_TURNS = 4;
// Units of a launch and tokens of a unit are counted in 32 bits, with room for another grid or turn.
constexpr long long MOST_COUNTED = 1ll << 30;

inline int wide_threads(int columns) { return 32 * (int)ceil_divide(columns, CHUNK); }

// Rows of any length: shared memory holds one FP32 sum for each chunk of 256.
template <auto KERNEL, typename T>
cudaError_t long_launch(const Arguments<T>& a, int device, cudaStream_t stream) {
    // Whole 16-byte words: the compiler reads the sums by such words, the last one too.
    const int bytes = (int)(ceil_divide(ceil_divide(a.columns, CHUNK), 4) * sizeof(float4));
    const cudaError_t error = allow_shared_memory<KERNEL>(device);
    if (error != cudaSuccess) return error;
    // 8: blocks for each processor of a large device; a row of this length fills a block.
    const long long rows = a.samples * a.tokens;
    const dim3 grid((unsigned)(rows < 8 * 132 ? rows : 8 * 132));
    return launch_kernel<KERNEL>(false, grid, WIDE_WARPS * 32, bytes, device, stream, a);
}

template <typename T, bool VECTOR, int THREADS>
cudaError_t forward_wide_launch(const Arguments<T>& a, int device, cudaStream_t stream) {
    constexpr auto kernel = forward_wide<T, VECTOR, THREADS>;
    const int threads = wide_threads(a.columns);
    const int bytes = RowSource<T, VECTOR, THREADS>::bytes();
    const long long rows = a.samples * a.tokens;
    const int grid = grid_size<kernel>(threads, bytes, device, rows);
    if (grid == 0) return cudaErrorLaunchOutOfResources;
    const long long per = ceil_divide(rows, grid);
    const dim3 blocks((unsigned)ceil_divide(rows, per));
    return launch_kernel<kernel>(false, blocks, threads, bytes, device, stream, a, per);
}

template <typename T> bool by_words(const Tokens<T>& t, int columns) {
    return vector_rows(t.data, t.token_stride, t.column_stride, columns, sizeof(T)) &&
           t.sample_stride * (long long)sizeof(T) % 16 == 0;
}

template <typename T, bool VECTOR>
cudaError_t forward_by(const Arguments<T>& a, int device, cudaStream_t stream) {
    if (a.columns <= 8 * CHUNK) return forward_wide_launch<T, VECTOR, 256>(a, device, stream);
    if (a.columns <= 12 * CHUNK) return forward_wide_launch<T, VECTOR, 384>(a, device, stream);
    return forward_wide_launch<T, VECTOR, 1024>(a, device, stream);
}

template <typename T>
cudaError_t forward(const Arguments<T>& a, int device, cudaStream_t stream) {
    if (a.columns > WIDE_WARPS * CHUNK) return long_launch<forward_long<T>>(a, device, stream);
    if (!by_words(a.x, a.columns)) return forward_by<T, false>(a, device, stream);
    // Where the rows on their way do not fit, they are read by elements.
    const cudaError_t error = forward_by<T, true>(a, device, stream);
    return error == cudaErrorLaunchOutOfResources ? forward_by<T, false>(a, device, stream) : error;
}

// What one launch takes: samples, each in `parts` of `per` tokens; `shared` if the sums of a sample
// are those of several blocks.
struct SumPlan {
    bool shared;
    long long samples, parts, per;
};

// Of samples that are left: whole ones, as many as fill all blocks, and then the rest in parts, if
// that takes fewer turns.
inline SumPlan plan_sums(long long samples, long long tokens, long long blocks) {
    const long long rest = samples % blocks;
    long long parts = rest == 0 ? 1 : blocks / rest;
    const long long most = ceil_divide(tokens, LEAST_TOKENS);
    if (parts > most) parts = most;
    const long long per = TURN * ceil_divide(ceil_divide(tokens, parts), TURN);
    parts = ceil_divide(tokens, per);
    const long long launches = samples > rest ? 2 : 1;
    const bool faster =
        ceil_divide(per, TURN) + launches * LAUNCH_TURNS < ceil_divide(tokens, TURN);
    if (parts < 2 || !faster) return {false, samples, 1, tokens};
    if (samples > rest) return {false, samples - rest, 1, tokens};
    return {true, rest, parts, per};
}

// The same for dx alone: as many tokens of one sample to a block as it takes to fill the device.
inline SumPlan plan_rows(long long samples, long long tokens, long long blocks) {
    long long per = ceil_divide(samples * tokens, blocks);
    per = TURN * ceil_divide(per < LEAST_TOKENS ? LEAST_TOKENS : per, TURN);
    return {false, samples, ceil_divide(tokens, per), per};
}

// One pass over all samples: dx and sums, or either; `workspace` gets the bytes that it takes
// instead of running, if it is not null.
template <typename T, bool VECTOR, int THREADS, Makes MAKES>
cudaError_t backward_wide_launch(Arguments<T> a, void* memory, int device, cudaStream_t stream,
                                 long long* workspace) {
    constexpr auto kernel = backward_wide<T, VECTOR, THREADS, MAKES>;
    constexpr bool SUMS = MAKES != Makes::kRows;
    const int threads = wide_threads(a.columns) < THREADS ? wide_threads(a.columns) : THREADS;
    const int slices = (int)ceil_divide(a.columns, threads * ELEMENTS);
    const int bytes =
        (SUMS ? 2 * Deeper::bytes(threads) : 0) + TokenSource<T, VECTOR, THREADS>::bytes();
    const int resident = resident_blocks<kernel>(threads, bytes, device);
    if (resident == 0) return cudaErrorLaunchOutOfResources;
    const long long blocks = ceil_divide(resident, slices);
    const int sums = SUMS ? (a.dscale != nullptr) + (a.dshift != nullptr) : 0;
    if (workspace != nullptr) *workspace = 0;
    for (long long first = 0; first < a.samples;) {
        // Without sums nothing is to be added up: every block takes some tokens of any sample.
        const long long left = a.samples - first;
        SumPlan plan = !SUMS ? plan_rows(left, a.tokens, blocks)
                                 : plan_sums(left, a.tokens, blocks);
        if (plan.samples > MOST_COUNTED / plan.parts) plan.samples = MOST_COUNTED / plan.parts;
        if (plan.per > MOST_COUNTED || plan.samples == 0) return cudaErrorInvalidValue;
        const long long units = plan.samples * plan.parts;
        const Division division{first, (int)plan.samples, (int)plan.parts, (int)plan.per};
        first += plan.samples;
        const JointSums joint(memory, a.columns, plan.shared ? sums : 0, plan.parts);
        const long long doubles = joint.doubles(plan.samples);
        if (workspace != nullptr) {
            if (plan.shared) *workspace = doubles * (long long)sizeof(double);
            continue;
        }
        cudaError_t error = cudaSuccess;
        if (plan.shared) error = launch_zeros(joint.levels, doubles, device, stream);
        if (error != cudaSuccess) return error;
        const dim3 grid((unsigned)(units < blocks ? units : blocks), (unsigned)slices);
        error = launch_kernel<kernel>(plan.shared, grid, threads, bytes, device, stream, a, division,
                                      joint);
        if (error == cudaSuccess && plan.shared) {
            const dim3 sums_of((unsigned)(joint.columns / CHUNK), (unsigned)(plan.samples * sums));
            error = launch_kernel<round_sums<T>>(true, sums_of, ROUND_THREADS, 0, device,
                                                 stream, a, joint, division.first);
        }
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// dx alone.
template <typename T, bool VECTOR>
cudaError_t rows_by(const Arguments<T>& a, int device, cudaStream_t stream) {
    constexpr Makes ROWS = Makes::kRows;
    if (a.columns > WIDE_WARPS * CHUNK) return long_launch<backward_long<T>>(a, device, stream);
    if (a.columns > 12 * CHUNK) {
        return backward_wide_launch<T, VECTOR, 1024, ROWS>(a, nullptr, device, stream, nullptr);
    }
    return backward_wide_launch<T, VECTOR, 384, ROWS>(a, nullptr, device, stream, nullptr);
}

// All by one pass where rows are of at most 3072 columns; otherwise, or where one of both is not wanted,
// by a pass for dx and one for the sums.
template <typename T, bool VECTOR>
cudaError_t backward_by(Arguments<T> a, void* memory, int device, cudaStream_t stream,
                        long long* workspace) {
    const bool rows = a.dx != nullptr, sums = a.dscale != nullptr || a.dshift != nullptr;
    if (workspace != nullptr) *workspace = 0;
    if (rows && sums && a.columns <= 12 * CHUNK) {
        const cudaError_t error =
            a.columns <= 8 * CHUNK
                ? backward_wide_launch<T, VECTOR, 256, Makes::kAll>(a, memory, device, stream,
                                                                    workspace)
                : backward_wide_launch<T, VECTOR, 384, Makes::kAll>(a, memory, device, stream,
                                                                    workspace);
        if (error != cudaErrorLaunchOutOfResources) return error;
    }
    if (workspace == nullptr && rows) {
        cudaError_t error = rows_by<T, VECTOR>(a, device, stream);
        // Not all by elements: the workspace is for the sums that follow here.
        if (error == cudaErrorLaunchOutOfResources) error = rows_by<T, false>(a, device, stream);
        if (error != cudaSuccess) return error;
    }
    if (!sums) return cudaSuccess;
    const cudaError_t error =
        backward_wide_launch<T, VECTOR, 256, Makes::kSums>(a, memory, device, stream, workspace);
    if (error != cudaErrorLaunchOutOfResources) return error;
    // Without a ring they need no more than what every device has.
    return backward_wide_launch<T, false, 256, Makes::kSums>(a, memory, device, stream, workspace);
}

// Run backward, or only say how many bytes of workspace it takes.
template <typename T>
cudaError_t backward(const Arguments<T>& a, void* memory, int device, cudaStream_t stream,
                     long long* workspace) {
    cudaError_t status = cudaErrorLaunchOutOfResources;
    if (by_words(a.x, a.columns) && by_words(a.dout, a.columns)) {
        status = backward_by<T, true>(a, memory, device, stream, workspace);
    }
    if (status != cudaErrorLaunchOutOfResources) return status;
    return backward_by<T, false>(a, memory, device, stream, workspace);
}

// Columns are counted in 32 bits, with room to round up to a chunk.
constexpr long long MOST_COLUMNS = (1ll << 31) - 1 - CHUNK;

// What forward and backward calls both have.
template <typename T, typename Call> Arguments<T> arguments(const Call& a) {
    Arguments<T> n{};
    n.x = {static_cast<const T*>(a.x), a.x_stride_T, a.x_stride_S, a.x_stride_N};
    n.scale = {a.scale, a.scale_stride_T, a.scale_stride_N};
    n.shift = {a.shift, a.shift_stride_T, a.shift_stride_N};
    n.samples = a.T;
    n.tokens = a.S;
    n.columns = (int)a.N;
    n.length = Divisor(n.columns);
    n.eps = a.eps;
    return n;
}

template <typename Call> int run_forward(const Call& a) {
    if (a.N > MOST_COLUMNS) return cudaErrorInvalidValue;
    DeviceGuard guard(a.device);
    if (guard.error() != cudaSuccess) return guard.error();
    return by_dtype(a.x_dtype, [&](auto zero) {
        using T = decltype(zero);
        Arguments<T> n = arguments<T>(a);
        n.out = static_cast<T*>(a.out);
        n.mean_out = static_cast<float*>(a.mean);
        n.rstd_out = static_cast<float*>(a.rstd);
        return forward<T>(n, a.device, static_cast<cudaStream_t>(a.stream));
    });
}

template <typename Call> int run_backward(const Call& a, long long* workspace) {
    if (a.N > MOST_COLUMNS) return cudaErrorInvalidValue;
    DeviceGuard guard(a.device);
    if (guard.error() != cudaSuccess) return guard.error();
    return by_dtype(a.x_dtype, [&](auto zero) {
        using T = decltype(zero);
        Arguments<T> n = arguments<T>(a);
        n.dout = {static_cast<const T*>(a.dout), a.dout_stride_T, a.dout_stride_S, a.dout_stride_N};
        n.mean = {static_cast<const float*>(a.mean), a.mean_stride_T, a.mean_stride_S};
        n.rstd = {static_cast<const float*>(a.rstd), a.rstd_stride_T, a.rstd_stride_S};
        n.dx = static_cast<T*>(a.dx);
        n.dscale = static_cast<T*>(a.dscale);
        n.dshift = static_cast<T*>(a.dshift);
        return backward<T>(n, a.workspace, a.device, static_cast<cudaStream_t>(a.stream), workspace);
    });
}

}  // namespace rlk
