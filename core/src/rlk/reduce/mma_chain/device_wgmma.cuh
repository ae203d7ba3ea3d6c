// SPDX-License-Identifier: Apache-2.0
// What Hopper brings for the MMA chain: barriers in shared memory, TMA into the tiles of a cluster,
// and how wgmma finds operands in them. Only code for sm_90a may call what stands here.
#pragma once
#include <cuda.h>
#include <stdint.h>

#include "rlk/reduce/mma_chain/device_cuda.cuh"

namespace rlk {

// 64: of K in one stage; 128 bytes of narrow elements, the width of the swizzle.
constexpr int WGMMA_BK = 64;
// 64: rows of one wgmma.
constexpr int WGMMA_ROWS = 64;
constexpr int WARPGROUP = 128;

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

// Arrive, and have the phase wait for this many bytes of TMA too.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// The same at a block of the cluster. Not `.release.cluster`: that costs a fence of the whole GPU,
// and there is nothing to publish: wgmma has read, and the caller has waited for its end.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(block)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// True in one lane of a whole warp: what the others compute beside it stays uniform.
__device__ __forceinline__ bool elected() {
    uint32_t one;
    asm volatile(
        "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.b32 %0, 1, 0, one;\n}"
        : "=r"(one));
    return one != 0;
}

__device__ __forceinline__ uint32_t rank_in_cluster() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Relaxed: fence.mbarrier_init publishes barriers, and at the end there is nothing to publish.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

__device__ __forceinline__ void warpgroup_sync(int barrier) {
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box from (x, y) on, x along the contiguous axis; what lies outside of the tensor is zero, and
// counts as bytes.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint64_t* barrier,
                                         int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
}

// The same to all blocks of the mask, each at this place of its own shared memory.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint64_t* barrier,
                                         int x, int y, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most PENDING groups of this warpgroup are running.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The parts of an operand's tile that are loaded, by the first blocks that share it, and how many
// rows or, of K, bytes a box of them has.
struct WgmmaParts {
    int count, box_rows, bytes;
};

// How a tile of ROWS by 64 of K lies in shared memory, of which SHARE blocks load a part each.
// K_MAJOR: rows of 128 bytes, swizzled, groups of 8 rows 1024 bytes apart. Else: chunks of CHUNK
// rows, [64 of K][CHUNK] each, swizzled over the width of a chunk.
template <bool K_MAJOR, int ROWS, int SHARE> struct WgmmaTile {
    static constexpr int CHUNK = ROWS % 64 == 0 ? 64 : 32;
    static constexpr int CHUNKS = ROWS / CHUNK;
    static constexpr int CHUNK_BYTES = CHUNK * WGMMA_BK * 2;
    static constexpr int BYTES = ROWS * WGMMA_BK * 2;
    // A part is some rows; or some chunks; or, of fewer chunks, some of K of all of them.
    static constexpr bool BY_CHUNKS = CHUNKS % SHARE == 0;
    static constexpr int BOX_K = K_MAJOR || BY_CHUNKS ? WGMMA_BK : WGMMA_BK / SHARE;
    static constexpr int BOX_ROWS = K_MAJOR ? ROWS / SHARE : CHUNK;
    static_assert(K_MAJOR || ROWS % 32 == 0, "whole chunks");
    static_assert(!K_MAJOR || (BOX_ROWS % 8 == 0 && BOX_ROWS <= 256), "what a box may be");
    // Bytes from one step of 16 of K to the next, and from 64 rows to the next.
    static constexpr int K_STEP = MMA_K * 2 * (K_MAJOR ? 1 : CHUNK);
    static constexpr int ROWS_STEP = WGMMA_ROWS * WGMMA_BK * 2;

    // Of an operand that has fewer rows than a tile only these: TMA takes longer over rows outside
    // than over others, and what is not loaded makes only results that nobody stores.
    static WgmmaParts parts(long long rows) {
        if (!K_MAJOR || rows >= ROWS) return {SHARE, BOX_ROWS, BYTES};
        const int useful = ((int)rows + 7) / 8 * 8, box = useful < BOX_ROWS ? useful : BOX_ROWS;
        const int count = (useful + box - 1) / box;
        return {count, box, count * box * WGMMA_BK * 2};
    }

    // What wgmma reads the tile by: the lower half of the descriptor of what lies at `at`. `bytes`
    // further it is this and bytes / 16, for shared memory ends before the field of addresses does.
    static __device__ __forceinline__ uint32_t place(uint32_t at) {
        constexpr uint32_t leading = K_MAJOR ? 1 : CHUNK_BYTES >> 4;
        return (at & 0x3ffff) >> 4 | leading << 16;
    }
    static __device__ __forceinline__ uint64_t descriptor(uint32_t place) {
        constexpr uint64_t stride = (K_MAJOR ? 1024 : 16 * CHUNK) >> 4;
        constexpr uint64_t swizzle = K_MAJOR || CHUNK == 64 ? 1 : 2;
        return (uint64_t)place | (stride << 32) | (swizzle << 62);
    }

    // Part `part` of the tile from (row, k) on, to all blocks of the mask.
    static __device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map,
                                                uint64_t* barrier, int row, int k, int part,
                                                uint16_t blocks) {
        const auto box = [&](uint32_t at, int x, int y) {
            if constexpr (SHARE > 1) {
                load_box(at, map, barrier, x, y, blocks);
            } else {
                load_box(at, map, barrier, x, y);
            }
        };
        if constexpr (K_MAJOR) {
            box(to + part * BOX_ROWS * WGMMA_BK * 2, k, row + part * BOX_ROWS);
        } else if constexpr (BY_CHUNKS) {
#pragma unroll
            for (int c = 0; c < CHUNKS / SHARE; ++c) {
                const int chunk = part * (CHUNKS / SHARE) + c;
                box(to + chunk * CHUNK_BYTES, row + chunk * CHUNK, k);
            }
        } else {
            const int from_k = part * BOX_K;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                box(to + c * CHUNK_BYTES + from_k * CHUNK * 2, row + c * CHUNK, k + from_k);
            }
        }
    }
};

}  // namespace rlk
