// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a call. Everything here may change speed; nothing here can change bits.
#pragma once
#include "rlk/cuda/grid.cuh"
#include "rlk/cuda/zeros.cuh"
#include "rlk_qwen3next/rms_norm/kernel_backward.cuh"

namespace rlk {

inline int wide_threads(int columns) { return 32 * (int)ceil_divide(columns, CHUNK); }

// Rows from which a table of activations takes less time to fill than it saves.
constexpr long long TABLE_ROWS = 65536, BACKWARD_TABLE_ROWS = 16384;

// A table holds BF16 values, and is looked up by the words that a row is read by.
template <typename T, typename N, bool VECTOR>
constexpr bool MAY_HAVE_TABLE = N::GATED && VECTOR && std::is_same_v<T, __nv_bfloat16>;

template <typename T, typename N, bool VECTOR, int LANES, int THREADS = NARROW_THREADS>
cudaError_t forward_narrow_launch(const NormArguments<T>& a, int device, cudaStream_t stream) {
    if constexpr (MAY_HAVE_TABLE<T, N, VECTOR> && THREADS != TABLE_THREADS) {
        if (a.rows >= TABLE_ROWS) {
            const cudaError_t status =
                forward_narrow_launch<T, N, VECTOR, LANES, TABLE_THREADS>(a, device, stream);
            // Not every device has the shared memory for a table.
            if (status != cudaErrorLaunchOutOfResources) return status;
        }
    }
    constexpr auto kernel = forward_narrow<T, N, VECTOR, LANES, THREADS>;
    constexpr int bytes = ForwardLayout<T, N, VECTOR, THREADS>::BYTES;
    const long long work = ceil_divide(a.rows, THREADS / LANES * FORWARD_ROWS);
    const int blocks = grid_size<kernel>(THREADS, bytes, device, work);
    if (blocks == 0) return cudaErrorLaunchOutOfResources;
    kernel<<<blocks, THREADS, bytes, stream>>>(a);
    return cudaGetLastError();
}

template <typename T, typename N, bool VECTOR, int THREADS>
cudaError_t forward_wide_launch(const NormArguments<T>& a, int device, cudaStream_t stream) {
    constexpr auto kernel = forward_wide<T, N, VECTOR, THREADS>;
    const int threads = wide_threads(a.columns), bytes = ForwardSource<T, N, VECTOR>::bytes(threads);
    const int blocks = grid_size<kernel>(threads, bytes, device, ceil_divide(a.rows, FORWARD_ROWS));
    if (blocks == 0) return cudaErrorLaunchOutOfResources;
    kernel<<<blocks, threads, bytes, stream>>>(a);
    return cudaGetLastError();
}

// Rows of any length: shared memory holds one FP32 sum for each chunk of 256.
template <auto KERNEL, typename T>
cudaError_t long_launch(const NormArguments<T>& a, int device, cudaStream_t stream) {
    const int threads = WIDE_WARPS * 32;
    // Whole 16-byte words: the compiler reads the sums by such words, the last one too.
    const int bytes = (int)(ceil_divide(ceil_divide(a.columns, CHUNK), 4) * sizeof(float4));
    const cudaError_t error = allow_shared_memory<KERNEL>(device);
    if (error != cudaSuccess) return error;
    // 8: blocks for each processor of a large device; a row of this length fills a block.
    const int blocks = (int)(a.rows < 8 * 132 ? a.rows : 8 * 132);
    KERNEL<<<blocks, threads, bytes, stream>>>(a);
    return cudaGetLastError();
}

template <typename T, typename N>
cudaError_t norm_forward(const NormArguments<T>& a, int device, cudaStream_t stream) {
    const bool vector =
        vector_rows(a.x.data, a.x.row_stride, a.x.column_stride, a.columns, sizeof(T)) &&
        (!N::BESIDE || vector_rows(a.beside.data, a.beside.row_stride, a.beside.column_stride,
                                   a.columns, sizeof(T)));
    if (a.columns <= CHUNK) {
        if (!vector) return forward_narrow_launch<T, N, false, 32>(a, device, stream);
        if (a.columns <= CHUNK / 2) {
            return forward_narrow_launch<T, N, true, 16>(a, device, stream);
        }
        return forward_narrow_launch<T, N, true, 32>(a, device, stream);
    }
    if (a.columns <= 8 * CHUNK) {
        return vector ? forward_wide_launch<T, N, true, 256>(a, device, stream)
                      : forward_wide_launch<T, N, false, 256>(a, device, stream);
    }
    if (a.columns <= WIDE_WARPS * CHUNK) {
        if (vector) {
            const cudaError_t status = forward_wide_launch<T, N, true, 1024>(a, device, stream);
            // Where the rows on their way do not fit, they are read by elements.
            if (status != cudaErrorLaunchOutOfResources) return status;
        }
        return forward_wide_launch<T, N, false, 1024>(a, device, stream);
    }
    return long_launch<forward_long<T, N>>(a, device, stream);
}

// Where a call of backward runs: filled first, so that the workspace can be sized for it.
struct BackwardPlan {
    int blocks, threads, shared_bytes;
};

template <auto KERNEL, typename Source>
BackwardPlan plan_backward(int threads, int device, long long work) {
    const int bytes =
        WindowSums<ELEMENTS>::doubles(threads) * (int)sizeof(double) + Source::bytes(threads);
    return {grid_size<KERNEL>(threads, bytes, device, work), threads, bytes};
}

template <typename T, typename N, bool VECTOR, int LANES, int THREADS = NARROW_THREADS>
cudaError_t backward_narrow_launch(NormArguments<T> a, int device, cudaStream_t stream,
                                   long long* workspace) {
    if constexpr (MAY_HAVE_TABLE<T, N, VECTOR> && THREADS != BACKWARD_TABLE_THREADS) {
        if (a.rows >= BACKWARD_TABLE_ROWS) {
            const cudaError_t status =
                backward_narrow_launch<T, N, VECTOR, LANES, BACKWARD_TABLE_THREADS>(
                    a, device, stream, workspace);
            // Not every device has the shared memory for a table.
            if (status != cudaErrorLaunchOutOfResources) return status;
        }
    }
    constexpr auto kernel = backward_narrow<T, N, VECTOR, LANES, THREADS>;
    using Layout = NarrowLayout<T, N, VECTOR, LANES, THREADS>;
    constexpr int bytes = Layout::BYTES;
    const int chunks = (int)ceil_divide(a.columns, CHUNK);
    const long long work = ceil_divide(a.rows, THREADS / LANES * TURN_ROWS);
    const int filling = grid_size<kernel>(THREADS, bytes, device, work);
    if (filling == 0) return cudaErrorLaunchOutOfResources;
    // 2: turns of one block that take less time than a launch of `combine_partials`. Chunks of a
    // longer row share the device.
    const int blocks = work <= 2 ? 1 : (int)ceil_divide(filling, chunks);
    if (workspace != nullptr) {
        *workspace = Partials::bytes(blocks, a.columns, true);
        return cudaSuccess;
    }
    a.partials = Partials(a.workspace, blocks, a.columns, true);
    kernel<<<dim3(blocks, chunks), THREADS, bytes, stream>>>(a);
    const cudaError_t error = cudaGetLastError();
    // One block finishes its columns itself.
    if (error != cudaSuccess || a.state == nullptr || blocks == 1) return error;
    return launch_combine(a.partials, blocks, a.result(), device, stream);
}

template <typename T, typename N, bool VECTOR, int THREADS, int BLOCKS>
cudaError_t backward_wide_launch(NormArguments<T> a, int device, cudaStream_t stream,
                                 long long* workspace) {
    constexpr auto kernel = backward_wide<T, N, VECTOR, THREADS, BLOCKS>;
    using Source = WideSource<T, N, VECTOR, THREADS>;
    const BackwardPlan plan = plan_backward<kernel, Source>(wide_threads(a.columns), device,
                                                            ceil_divide(a.rows, TURN_ROWS));
    if (plan.blocks == 0) return cudaErrorLaunchOutOfResources;
    if (workspace != nullptr) {
        *workspace = Partials::bytes(plan.blocks, a.columns, false);
        return cudaSuccess;
    }
    a.partials = Partials(a.workspace, plan.blocks, a.columns, false);
    cudaError_t error = cudaSuccess;
    if (a.state != nullptr) error = launch_zeros(a.state, STATE_ROWS * a.columns, device, stream);
    if (error != cudaSuccess) return error;
    error = launch_kernel<kernel>(a.state != nullptr, dim3(plan.blocks), plan.threads,
                                  plan.shared_bytes, device, stream, a);
    if (error != cudaSuccess || a.state == nullptr) return error;
    return launch_combine(a.partials, plan.blocks, a.result(), device, stream);
}

template <typename T, typename N>
cudaError_t backward_long_launch(NormArguments<T> a, int device, cudaStream_t stream,
                                 long long* workspace) {
    if (workspace == nullptr && (a.dx != nullptr || a.dgate != nullptr)) {
        const cudaError_t error = long_launch<backward_long<T, N>>(a, device, stream);
        if (error != cudaSuccess) return error;
    }
    if (workspace == nullptr && a.state == nullptr) return cudaSuccess;
    a.dx = a.dgate = nullptr;
    return backward_narrow_launch<T, N, false, 32>(a, device, stream, workspace);
}

// Rows of at most 8192 columns, read by words or by elements.
template <typename T, typename N, bool VECTOR>
cudaError_t backward_launch(const NormArguments<T>& a, int device, cudaStream_t stream,
                            long long* workspace) {
    constexpr int LANES = VECTOR ? CHUNK / 2 / ELEMENTS : CHUNK / ELEMENTS;
    if (a.columns <= LANES * ELEMENTS) {
        return backward_narrow_launch<T, N, VECTOR, LANES>(a, device, stream, workspace);
    }
    if (a.columns <= CHUNK) {
        return backward_narrow_launch<T, N, VECTOR, 32>(a, device, stream, workspace);
    }
    if (a.columns <= 8 * CHUNK) {
        return backward_wide_launch<T, N, VECTOR, 256, 2>(a, device, stream, workspace);
    }
    if (VECTOR && a.columns <= 12 * CHUNK) {
        const cudaError_t status =
            backward_wide_launch<T, N, VECTOR, 384, 1>(a, device, stream, workspace);
        // Not every device has the shared memory for its ring.
        if (status != cudaErrorLaunchOutOfResources) return status;
    }
    if (a.columns <= 16 * CHUNK) {
        return backward_wide_launch<T, N, VECTOR, 512, 1>(a, device, stream, workspace);
    }
    return backward_wide_launch<T, N, VECTOR, 1024, 1>(a, device, stream, workspace);
}

// Run backward, or only say how many bytes of workspace it takes.
template <typename T, typename N>
cudaError_t norm_backward(const NormArguments<T>& a, int device, cudaStream_t stream,
                          long long* workspace) {
    const auto aligned = [&](const Rows<T>& r) {
        return vector_rows(r.data, r.row_stride, r.column_stride, a.columns, sizeof(T));
    };
    const bool vector = aligned(a.x) && aligned(a.dy) && (!N::BESIDE || aligned(a.beside));
    // The last resort of each length needs no more than every device has.
    cudaError_t status = cudaErrorLaunchOutOfResources;
    if (a.columns <= WIDE_WARPS * CHUNK) {
        if (vector) status = backward_launch<T, N, true>(a, device, stream, workspace);
        if (status == cudaErrorLaunchOutOfResources) {
            status = backward_launch<T, N, false>(a, device, stream, workspace);
        }
    }
    if (status == cudaErrorLaunchOutOfResources) {
        status = backward_long_launch<T, N>(a, device, stream, workspace);
    }
    return status;
}

// 99 KB: the least that a block may take on a device from sm_80 on.
static_assert(NarrowLayout<float, Gated, false, 32, NARROW_THREADS>::BYTES <= 99 * 1024,
              "sums of a block without a ring fit every device");
static_assert(ForwardRing<float, Gated>::bytes(NARROW_THREADS) <= 99 * 1024,
              "rows on their way to a block of as many threads fit every device");

// The operands that all norms have, from the struct of a forward call.
template <typename T, typename Call> NormArguments<T> forward_arguments(const Call& a) {
    NormArguments<T> n{};
    n.x = {static_cast<const T*>(a.x), a.x_stride_T, a.x_stride_N};
    n.weight = a.weight;
    n.weight_stride = a.weight_stride_N;
    n.weight_dtype = a.weight_dtype;
    n.y = static_cast<T*>(a.y);
    n.rstd_out = static_cast<float*>(a.rstd);
    n.rows = a.T;
    n.columns = (int)a.N;
    n.length = Divisor(n.columns);
    n.eps = a.eps;
    n.weight_offset = a.weight_offset;
    return n;
}

template <typename T, typename Call> NormArguments<T> backward_arguments(const Call& a) {
    NormArguments<T> n{};
    n.dy = {static_cast<const T*>(a.dy), a.dy_stride_T, a.dy_stride_N};
    n.x = {static_cast<const T*>(a.x), a.x_stride_T, a.x_stride_N};
    n.weight = a.weight;
    n.weight_stride = a.weight_stride_N;
    n.weight_dtype = a.weight_dtype;
    n.rstd = static_cast<const float*>(a.rstd);
    n.rstd_stride = a.rstd_stride_T;
    n.dx = static_cast<T*>(a.dx);
    n.state = a.dweight_state;
    n.sums = a.dweight_sums;
    n.form = a.dweight_form;
    n.workspace = a.workspace;
    n.rows = a.T;
    n.columns = (int)a.N;
    n.length = Divisor(n.columns);
    n.weight_offset = a.weight_offset;
    return n;
}

// Columns are counted in 32 bits, with room to round up to a chunk.
constexpr long long MOST_COLUMNS = (1ll << 31) - 1 - CHUNK;

// Run a call on its device; `add_own(arguments)` fills what only some norms have.
template <typename N, typename Call, typename AddOwn>
int run_forward(const Call& a, AddOwn add_own) {
    if (a.N > MOST_COLUMNS) return cudaErrorInvalidValue;
    DeviceGuard guard(a.device);
    if (guard.error() != cudaSuccess) return guard.error();
    return by_dtype(a.x_dtype, [&](auto zero) {
        auto n = forward_arguments<decltype(zero)>(a);
        add_own(n);
        return norm_forward<decltype(zero), N>(n, a.device,
                                                   static_cast<cudaStream_t>(a.stream));
    });
}

template <typename N, typename Call, typename AddOwn>
int run_backward(const Call& a, AddOwn add_own, long long* workspace) {
    if (a.N > MOST_COLUMNS) return cudaErrorInvalidValue;
    DeviceGuard guard(a.device);
    if (guard.error() != cudaSuccess) return guard.error();
    return by_dtype(a.x_dtype, [&](auto zero) {
        auto n = backward_arguments<decltype(zero)>(a);
        add_own(n);
        return norm_backward<decltype(zero), N>(
            n, a.device, static_cast<cudaStream_t>(a.stream), workspace);
    });
}

// Bytes of workspace that a call of backward takes, or -1 if that cannot be told.
template <typename N, typename Call, typename AddOwn>
long long backward_workspace(const Call& a, AddOwn add_own) {
    long long bytes = 0;
    return run_backward<N>(a, add_own, &bytes) == cudaSuccess ? bytes : -1;
}

}  // namespace rlk
