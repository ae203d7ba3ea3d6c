// SPDX-License-Identifier: Apache-2.0
// The fastest way we know to read some streams of memory and write others: the floor of a kernel
// that must move the same.
#include "rlk_bandwidth.h"

namespace {

constexpr int THREADS = 256;
constexpr int MOST = 4;

struct Streams {
    const uint4* read[MOST];
    uint4* write[MOST];
};

// 16 bytes a time: `unroll` loads of each stream are in flight before the first store.
template <int READS, int WRITES, int UNROLL>
__global__ void __launch_bounds__(THREADS) move(Streams s, long long words) {
    const long long step = (long long)gridDim.x * THREADS * UNROLL;
    for (long long base = (long long)blockIdx.x * THREADS * UNROLL + threadIdx.x; base < words;
         base += step) {
        uint4 sum[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            sum[u] = make_uint4(0, 0, 0, 0);
            const long long at = base + u * THREADS;
            if (at >= words) continue;
#pragma unroll
            for (int r = 0; r < READS; ++r) {
                const uint4 value = __ldcs(s.read[r] + at);
                sum[u].x ^= value.x;
                sum[u].y ^= value.y;
                sum[u].z ^= value.z;
                sum[u].w ^= value.w;
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long at = base + u * THREADS;
            if (at >= words) continue;
#pragma unroll
            for (int w = 0; w < WRITES; ++w) __stcs(s.write[w] + at, sum[u]);
        }
    }
}

template <int READS, int WRITES, int UNROLL> cudaError_t launch(const BandwidthMove& a) {
    const Streams s{{static_cast<const uint4*>(a.read0), static_cast<const uint4*>(a.read1),
                     static_cast<const uint4*>(a.read2), static_cast<const uint4*>(a.read3)},
                    {static_cast<uint4*>(a.write0), static_cast<uint4*>(a.write1),
                     static_cast<uint4*>(a.write2), static_cast<uint4*>(a.write3)}};
    const long long tile = THREADS * UNROLL;
    long long blocks = (a.words + tile - 1) / tile;
    if (a.blocks > 0 && a.blocks < blocks) blocks = a.blocks;
    move<READS, WRITES, UNROLL>
        <<<(unsigned)blocks, THREADS, 0, static_cast<cudaStream_t>(a.stream)>>>(s, a.words);
    return cudaGetLastError();
}

template <int READS, int WRITES> cudaError_t by_unroll(const BandwidthMove& a) {
    switch (a.unroll) {
        case 1: return launch<READS, WRITES, 1>(a);
        case 2: return launch<READS, WRITES, 2>(a);
        case 4: return launch<READS, WRITES, 4>(a);
        case 8: return launch<READS, WRITES, 8>(a);
    }
    return cudaErrorInvalidValue;
}

template <int READS> cudaError_t by_writes(const BandwidthMove& a) {
    switch (a.writes) {
        case 1: return by_unroll<READS, 1>(a);
        case 2: return by_unroll<READS, 2>(a);
        case 3: return by_unroll<READS, 3>(a);
        case 4: return by_unroll<READS, 4>(a);
    }
    return cudaErrorInvalidValue;
}

}  // namespace

int rlk_bandwidth_move(const BandwidthMove* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    switch (a->reads) {
        case 1: return by_writes<1>(*a);
        case 2: return by_writes<2>(*a);
        case 3: return by_writes<3>(*a);
        case 4: return by_writes<4>(*a);
    }
    return cudaErrorInvalidValue;
}
