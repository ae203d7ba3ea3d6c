// SPDX-License-Identifier: Apache-2.0
// Launches of kernel_wgmma.cuh: maps for TMA, and how many clusters a GPU runs at once.
#pragma once
#include <atomic>
#include <type_traits>
#include <utility>

#include "rlk/reduce/mma_chain/kernel_wgmma.cuh"

namespace rlk {
namespace {

// What a launch returns if this binary has no wgmma for the GPU: mma.sync then forms the same chain.
constexpr cudaError_t NO_WGMMA = cudaErrorNoKernelImageForDevice;

// An operand [rows, K] in the kernel's orientation; strides in elements.
struct WgmmaOperand {
    const void* data;
    long long rows, row_stride, k_stride;
};

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
    static const EncodeTiled found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        // 12000: the CUDA version that brought it. From the driver: no link to libcuda.
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
        return there ? reinterpret_cast<EncodeTiled>(function) : nullptr;
    }();
    return found;
}

// The map by which TMA reads boxes of a tile, in the order of memory.
template <typename T, bool K_MAJOR, typename Tile>
cudaError_t encode(CUtensorMap* map, const WgmmaOperand& from, long long K, int box_rows) {
    if (encode_tiled() == nullptr) return cudaErrorSymbolNotFound;
    const long long inner = K_MAJOR ? K : from.rows, outer = K_MAJOR ? from.rows : K;
    // Of one row there is no second to step to: any stride that TMA takes.
    const long long leading =
        outer == 1 ? (inner + 7) / 8 * 8 : (K_MAJOR ? from.row_stride : from.k_stride);
    const cuuint64_t sizes[2] = {(cuuint64_t)inner, (cuuint64_t)outer};
    const cuuint64_t strides[1] = {(cuuint64_t)leading * sizeof(T)};
    const cuuint32_t box[2] = {(cuuint32_t)(K_MAJOR ? Tile::BOX_K : box_rows),
                               (cuuint32_t)(K_MAJOR ? box_rows : Tile::BOX_K)};
    const cuuint32_t ones[2] = {1, 1};
    const CUresult result = encode_tiled()(
        map,
        std::is_same<T, __half>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2, const_cast<void*>(from.data), sizes, strides, box, ones,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// 64: more GPUs than a process sees; those beyond are asked at every launch.
constexpr int MOST_GPUS = 64;
// 32: an empty kernel has fewer registers, one with accumulators more.
constexpr int LEAST_REGISTERS = 32;

// How many clusters of a kernel run side by side; none of one that this binary has not.
template <typename S, typename Kernel>
cudaError_t ask_clusters(Kernel kernel, cudaLaunchConfig_t config, int device, int* clusters) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    *clusters = 0;
    if (attributes.numRegs < LEAST_REGISTERS) return cudaSuccess;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error != cudaSuccess) return error;
    config.gridDim = dim3(S::CLUSTER);
    error = cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
    if (error != cudaSuccess) return error;
    int multiprocessors = 0;
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const int most = multiprocessors / S::CLUSTER;
    if (most < *clusters) *clusters = most;
    return error;
}

template <typename T, typename S>
cudaError_t launch_wgmma(WgmmaCall p, const WgmmaOperand& a, const WgmmaOperand& b,
                         int device, cudaStream_t stream) {
    const auto kernel = chain_wgmma<T, S>;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = S::CLUSTER;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(S::THREADS);
    config.dynamicSmemBytes = S::SHARED;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;

    // 1 more than the answer, 0 before it. Two threads that ask at once get the same one.
    static std::atomic<int> answers[MOST_GPUS];
    int clusters = device < MOST_GPUS ? answers[device].load() - 1 : -1;
    if (clusters < 0) {
        const cudaError_t error = ask_clusters<S>(kernel, config, device, &clusters);
        if (error != cudaSuccess) return error;
        if (device < MOST_GPUS) answers[device].store(clusters + 1);
    }
    if (clusters == 0) return NO_WGMMA;

    CUtensorMap map_a, map_b;
    p.a_parts = S::A::parts(a.rows);
    p.b_parts = S::B::parts(b.rows);
    cudaError_t error =
        encode<T, S::A_K, typename S::A>(&map_a, a, p.K, p.a_parts.box_rows);
    if (error == cudaSuccess) {
        error = encode<T, S::B_K, typename S::B>(&map_b, b, p.K, p.b_parts.box_rows);
    }
    if (error != cudaSuccess) return error;
    const long long tiles_m = (p.M + S::BM - 1) / S::BM, tiles_n = (p.N + S::BN - 1) / S::BN;
    const long long units =
        (tiles_m + S::CM - 1) / S::CM * ((tiles_n + S::CN - 1) / S::CN);
    config.gridDim = dim3((unsigned)((units < clusters ? units : clusters) * S::CLUSTER));
    return cudaLaunchKernelEx(&config, kernel, map_a, map_b, p);
}

// The product by the kernel that the generated header numbers `a.wgmma`.
template <typename T> cudaError_t launch_wgmma(const MmaChainProduct& a) {
    WgmmaOperand left{a.a, a.M, a.a_stride_m, a.a_stride_k};
    WgmmaOperand right{a.b, a.N, a.b_stride_n, a.b_stride_k};
    WgmmaCall p{a.out, a.bias, static_cast<const float*>(a.initial), a.M, a.N, a.K, a.N, 1,
                a.initial_stride_m, a.initial_stride_n, a.bias_stride, a.bias_dtype, a.out_dtype,
                a.swap != 0, false, a.group};
    // Every row of the result then begins at a multiple of 16 bytes.
    const int per_word = a.out_dtype == kFloat32 ? 4 : 8;
    p.wide = !a.swap && a.N % per_word == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
    if (a.swap) {
        std::swap(left, right);
        std::swap(p.M, p.N);
        std::swap(p.out_stride_m, p.out_stride_n);
        std::swap(p.initial_stride_m, p.initial_stride_n);
    }
    const cudaStream_t stream = static_cast<cudaStream_t>(a.stream);
#define LAUNCH(NUMBER, ...)                                                                  \
    if (a.wgmma == NUMBER) {                                                                 \
        return launch_wgmma<T, WgmmaShape<__VA_ARGS__>>(p, left, right, a.device, stream);   \
    }
    RLK_MMA_CHAIN_WGMMA(LAUNCH)
#undef LAUNCH
    return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace rlk
