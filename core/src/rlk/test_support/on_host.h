// SPDX-License-Identifier: Apache-2.0
// Device code on the CPU: what it takes of CUDA, with blocks one after another and the threads of a
// block by turns, each until the next barrier. So no run differs from another, and tools that find
// reads of foreign memory work. FP32 and FP64 operations are IEEE here too.
#pragma once
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
// One block runs at a time.
#define __shared__ static

using std::fabs;
using std::isfinite;
using std::isinf;
using std::max;
using std::min;

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace on_host {

// 64 KB: the stack of a thread.
constexpr size_t STACK = 1 << 16;

// The threads of a block, each with a stack of its own.
struct Block {
    struct Thread {
        ucontext_t context;
        std::unique_ptr<char[]> stack{new char[STACK]};
        bool alive = true;
    };
    std::vector<Thread> threads;
    std::function<void()> body;
    ucontext_t turns;
    int current = 0, live, arrived = 0;
    bool any_next = false, any = false;  // of the votes at the next barrier, and at the last
    long long passed = 0;  // barriers
    std::vector<long long> exchanged[2];
};
inline Block* block = nullptr;
// What a launch gives to a block; whoever runs a grid sets it.
inline void* launched_memory = nullptr;

inline void enter() {
    block->body();
    block->threads[block->current].alive = false;
    --block->live;
    swapcontext(&block->threads[block->current].context, &block->turns);
}

// Those that have returned are not waited for.
inline void barrier() {
    const long long before = block->passed;
    ++block->arrived;
    while (block->passed == before) {
        if (block->arrived == block->live) {
            block->arrived = 0;
            block->any = block->any_next;
            block->any_next = false;
            ++block->passed;
        } else {
            swapcontext(&block->threads[block->current].context, &block->turns);
            threadIdx.x = block->current;
        }
    }
}

inline void run_block(int count, std::function<void()> body) {
    Block own;
    own.threads = std::vector<Block::Thread>(count);
    own.body = body;
    own.live = count;
    own.exchanged[0].resize(count);
    own.exchanged[1].resize(count);
    block = &own;
    blockDim = dim3(count);
    for (auto& thread : own.threads) {
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK;
        makecontext(&thread.context, enter, 0);
    }
    while (own.live > 0) {
        for (int i = 0; i < count; ++i) {
            if (!own.threads[i].alive) continue;
            own.current = i;
            threadIdx.x = i;
            swapcontext(&own.turns, &own.threads[i].context);
        }
    }
    block = nullptr;
}

inline void run_grid(dim3 grid, int threads, std::function<void()> body) {
    gridDim = grid;
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = dim3(x, y);
            run_block(threads, body);
        }
    }
}

}  // namespace on_host

inline void __syncthreads() { on_host::barrier(); }
inline int __syncthreads_or(int any) {
    on_host::block->any_next |= any != 0;
    on_host::barrier();
    return on_host::block->any;
}
// Whole blocks call, in the tests that use these.
template <typename T> T exchange(T value, unsigned from) {
    static_assert(sizeof(T) <= sizeof(long long), "fits");
    auto& places = on_host::block->exchanged[on_host::block->passed % 2];
    memcpy(&places[threadIdx.x], &value, sizeof(T));
    on_host::barrier();
    memcpy(&value, &places[from], sizeof(T));
    return value;
}
template <typename T> T __shfl_xor_sync(unsigned, T value, int distance) {
    return exchange(value, threadIdx.x ^ distance);
}
template <typename T> T __shfl_sync(unsigned, T value, int lane) {
    return exchange(value, threadIdx.x / 32 * 32 + lane);
}
inline void __syncwarp() { on_host::barrier(); }
inline int __any_sync(unsigned, int any) {
    auto& places = on_host::block->exchanged[on_host::block->passed % 2];
    places[threadIdx.x] = any != 0;
    on_host::barrier();
    int result = 0;
    for (unsigned i = 0; i < 32; ++i) result |= places[threadIdx.x / 32 * 32 + i] != 0;
    return result;
}
template <typename T> T atomicAdd(T* at, T value) {
    const T before = *at;
    *at += value;
    return before;
}

template <typename To, typename From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }
inline uint32_t __float_as_uint(float value) { return bits_as<uint32_t>(value); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz((unsigned)value); }
inline long long __double_as_longlong(double value) { return bits_as<long long>(value); }
inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __double2float_rn(double value) { return (float)value; }
inline float __double2float_rz(double value) {
    const float near = (float)value;
    return fabs((double)near) > fabs(value) ? std::nextafter(near, 0.0f) : near;
}

// The sum of products of two 16-bit numbers of a word and two bytes, and c.
inline uint32_t __dp2a_lo(uint32_t a, uint32_t b, uint32_t c) {
    return c + (a & 0xffffu) * (b & 0xffu) + (a >> 16) * (b >> 8 & 0xffu);
}

// Narrow floats, as bits, rounded to nearest even. FP16 is stored only, not read.
struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float((uint32_t)v.bits << 16); }
float __half2float(__half);
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (value != value) return {0x7fffu};
    return {(uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
inline __half __float2half_rn(float value) {
    const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
    const uint16_t sign = (uint16_t)(__float_as_uint(value) >> 16 & 0x8000u);
    if (value != value) return {0x7fffu};
    const float size = std::fabs(value);
    if (size >= 65520.0f) return {(uint16_t)(sign | 0x7c00u)};
    // Subnormals are multiples of 2^-24; a carry makes the lowest normal number.
    if (size < 0x1p-14f) return {(uint16_t)(sign | (uint16_t)std::nearbyint(size * 0x1p24f))};
    return {(uint16_t)(sign | (uint16_t)((bits - (112u << 23) + 0xfffu + (bits >> 13 & 1)) >> 13))};
}
struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
template <typename T> T __ldg(const T* at) { return *at; }
template <typename T> T __ldcs(const T* at) { return *at; }
template <typename T> void __stcs(T* at, T value) { *at = value; }

// Copies are done at once: a wait that is missing goes unseen.
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
    memcpy(to, from, bytes);
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {}

// Launches run the kernel, whose shared memory is full of ones: nothing may count on zeros.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchOutOfResources = 701 };
enum { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
struct cudaFuncAttributes {
    int ptxVersion = 80;
    size_t sharedSizeBytes = 0;
};
inline cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
template <typename Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <typename... Expected, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...),
                               Given... given) {
    std::vector<uint4> memory(config->dynamicSmemBytes / sizeof(uint4) + 1);
    memset(memory.data(), 0xff, memory.size() * sizeof(uint4));
    on_host::launched_memory = memory.data();
    on_host::run_grid(config->gridDim, (int)config->blockDim.x, [&] { kernel(given...); });
    return cudaSuccess;
}

// A device of 2 processors, each of 86 KB of shared memory, beside what kernels declare, and of room
// for 1024 threads.
enum { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? 2 : 86 << 10;
    return cudaSuccess;
}
template <typename Kernel> cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
    return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int threads,
                                                          size_t bytes) {
    const int fit = bytes == 0 ? 1024 : (int)((86 << 10) / bytes);
    *blocks = min(1024 / threads, fit);
    return cudaSuccess;
}

namespace rlk {
enum Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
template <typename T> T* launched_memory() { return static_cast<T*>(on_host::launched_memory); }

struct DeviceGuard {
    explicit DeviceGuard(int) {}
    cudaError_t error() const { return cudaSuccess; }
};
}  // namespace rlk
