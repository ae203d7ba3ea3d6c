// SPDX-License-Identifier: Apache-2.0
// The product of mma_chain on Hopper, in BF16 and FP16: TMA loads tiles, one for all blocks of a
// cluster that need it, and wgmma multiplies them. One warpgroup of a block loads, the others
// consume: together one tile, or in turns a tile each. rlk_mma_chain_wgmma.h, which is generated
// from tiles.py, has the shapes and wgmma itself. Bodies are empty for other targets than sm_90a.
#pragma once
#include <type_traits>

#include "rlk/reduce/mma_chain/device_wgmma_result.cuh"
#include "rlk_mma_chain_wgmma.h"

namespace rlk {
namespace {

// A cluster is CN tiles wide and CM high; GROUPS warpgroups consume.
template <bool A_K_, bool B_K_, int BM_, int BN_, int GROUPS_, int STAGES_, bool TURNS_, int CN_,
          int CM_>
struct WgmmaShape {
    static constexpr bool A_K = A_K_, B_K = B_K_, TURNS = TURNS_;
    static constexpr int BM = BM_, BN = BN_, GROUPS = GROUPS_, STAGES = STAGES_;
    static constexpr int CN = CN_, CM = CM_, CLUSTER = CN * CM;
    static constexpr int THREADS = WARPGROUP * (GROUPS + 1);
    static constexpr int ROWS_A_GROUP = TURNS ? BM : BM / GROUPS;
    static constexpr int MI = ROWS_A_GROUP / WGMMA_ROWS;
    // Steps of a tile that wgmma may have before it: it waits for no barrier of the next one then.
    static constexpr int AHEAD = STAGES >= 8 ? 3 : 1;
    // Warps that free a stage: of all blocks of the cluster, not only of those that this one writes
    // into. One of these may need no load of others, for boxes are cut; ahead, it would be counted
    // twice where another is not done.
    static constexpr int CONSUMERS = (TURNS ? 1 : GROUPS) * 4 * CLUSTER;
    using A = WgmmaTile<A_K, BM, CN>;
    using B = WgmmaTile<B_K, BN, CM>;
    // In shared memory, in this order; 2: the tiles of a warpgroup that one barrier keeps apart.
    static constexpr int TILES = STAGES * (A::BYTES + B::BYTES);
    static constexpr int OUTGOING = GROUPS * 4 * Outgoing<BN>::BYTES;
    static constexpr int BIASES = GROUPS * 2 * BN * 4;
    static constexpr int BARRIERS = (2 * STAGES + 2) * 8;
    // 1024: the swizzle's period, to which the first tile is aligned.
    static constexpr int SHARED = TILES + OUTGOING + BIASES + BARRIERS + 1024;
    static_assert(MI >= 1 && MI * WGMMA_ROWS == ROWS_A_GROUP && BN % 16 == 0, "whole steps");
    static_assert(!TURNS || GROUPS == 2, "two take turns");
    static_assert(SHARED <= 227 * 1024, "shared memory of a block");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A place in the ring of stages, and the parity of its round.
template <int STAGES> struct Ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int steps) {
        stage += steps % STAGES;
        parity ^= steps / STAGES & 1;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// What a block has in shared memory.
template <typename S> struct WgmmaMemory {
    uint32_t a, b;
    unsigned char* outgoing;
    float* biases;
    uint64_t *full, *empty, *turn;

    __device__ __forceinline__ explicit WgmmaMemory(unsigned char* raw) {
        a = (shared_address(raw) + 1023) & ~1023u;
        b = a + S::STAGES * S::A::BYTES;
        outgoing = raw + (a - shared_address(raw)) + S::TILES;
        biases = reinterpret_cast<float*>(outgoing + S::OUTGOING);
        full = reinterpret_cast<uint64_t*>(outgoing + S::OUTGOING + S::BIASES);
        empty = full + S::STAGES;
        turn = empty + S::STAGES;
    }
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < S::STAGES; ++i) {
            barrier_init(full + i, 2);  // operands
            barrier_init(empty + i, S::CONSUMERS);
        }
        // The warps of a warpgroup: were it one of them, the others could miss a phase of two.
        barrier_init(turn, WARPGROUP / 32);
        barrier_init(turn + 1, WARPGROUP / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// Which tiles a block forms: `unit` counts places of its cluster, in groups of rows.
template <typename S> struct WgmmaPlaces {
    int units_m, units_n, units, first, stride, group, cn, cm;

    __device__ __forceinline__ explicit WgmmaPlaces(const WgmmaCall& p) : group(p.group) {
        const int rank = S::CLUSTER > 1 ? (int)rank_in_cluster() : 0;
        cn = rank % S::CN;
        cm = rank / S::CN;
        const int tiles_m = (int)((p.M + S::BM - 1) / S::BM);
        const int tiles_n = (int)((p.N + S::BN - 1) / S::BN);
        units_m = (tiles_m + S::CM - 1) / S::CM;
        units_n = (tiles_n + S::CN - 1) / S::CN;
        units = units_m * units_n;
        first = blockIdx.x / S::CLUSTER;
        stride = gridDim.x / S::CLUSTER;
    }
    // First row and column of the tile; it may lie outside, at the edge of a cluster.
    __device__ __forceinline__ void find(int unit, int& row, int& column) const {
        const int per_group = group * units_n, above = unit / per_group * group;
        const int height = min(units_m - above, group), rest = unit % per_group;
        row = ((above + rest % height) * S::CM + cm) * S::BM;
        column = (rest / height * S::CN + cn) * S::BN;
    }
};

// A warp has TMA load this block's part of an operand in every stage; another one those of the
// other operand, for small tiles wait for the loads of one.
template <typename S, bool OF_A>
__device__ __forceinline__ void produce(const WgmmaMemory<S>& memory, const WgmmaPlaces<S>& places,
                                        const CUtensorMap& map, const WgmmaParts& parts,
                                        int steps) {
    using Tile = std::conditional_t<OF_A, typename S::A, typename S::B>;
    // Who shares it: the blocks of the row, or those of the column.
    constexpr int SHARE = OF_A ? S::CN : S::CM;
    const int part = OF_A ? places.cn : places.cm;
    uint16_t blocks = 0;
    for (int i = 0; i < SHARE; ++i) {
        blocks |= (uint16_t)(1u << (OF_A ? places.cm * S::CN + i : i * S::CN + places.cn));
    }
    const bool issues = elected(), loads = part < parts.count;
    Ring<S::STAGES> ring;
    for (int unit = places.first; unit < places.units; unit += places.stride) {
        int row, column;
        places.find(unit, row, column);
        for (int step = 0; step < steps; ++step, ring.next()) {
            // A lane that lagged by a whole ring would take another phase for this one.
            __syncwarp();
            barrier_wait(memory.empty + ring.stage, ring.parity ^ 1);
            if (!issues) continue;
            barrier_expect(memory.full + ring.stage, parts.bytes);
            if (!loads) continue;
            Tile::load((OF_A ? memory.a : memory.b) + ring.stage * Tile::BYTES, &map,
                       memory.full + ring.stage, OF_A ? row : column, step * WGMMA_BK, part,
                       blocks);
        }
    }
    // All that the blocks of the cluster have read of this one's stages is told: nobody arrives at
    // the barriers of a block that has left.
    for (int i = 0; S::CLUSTER > 1 && i < S::STAGES; ++i, ring.next()) {
        barrier_wait(memory.empty + ring.stage, ring.parity ^ 1);
    }
}

// This warp has read a stage: the blocks of the cluster may write into it again.
template <typename S>
__device__ __forceinline__ void release(const WgmmaMemory<S>& memory, int stage) {
    const int lane = threadIdx.x & 31;
    if constexpr (S::CLUSTER == 1) {
        if (lane == 0) barrier_arrive(memory.empty + stage);
    } else if (lane < S::CLUSTER) {
        barrier_arrive_at(memory.empty + stage, (uint32_t)lane);
    }
}

// The chains of one tile over all of K.
template <typename T, typename S>
__device__ __forceinline__ void multiply_tile(const WgmmaMemory<S>& memory, Ring<S::STAGES>& ring,
                                              int steps, int group, int continues,
                                              float (&acc)[S::MI][S::BN / 2]) {
    using A = typename S::A;
    using B = typename S::B;
    // Of the first stage: what every step computes anew, small tiles wait for.
    const uint32_t first_a = A::place(memory.a + (S::TURNS ? 0 : group * S::MI * A::ROWS_STEP));
    const uint32_t first_b = B::place(memory.b);
    Ring<S::STAGES> read = ring;
    const auto block = [&](int add) {
        barrier_wait(memory.full + ring.stage, ring.parity);
        wgmma_fence();
        const uint32_t a = first_a + ring.stage * (A::BYTES / 16);
        const uint32_t b = first_b + ring.stage * (B::BYTES / 16);
#pragma unroll
        for (int k = 0; k < WGMMA_BK / MMA_K; ++k) {
#pragma unroll
            for (int i = 0; i < S::MI; ++i) {
                Wgmma<T, S::BN, S::A_K, S::B_K>::step(
                    acc[i], A::descriptor(a + (i * A::ROWS_STEP + k * A::K_STEP) / 16),
                    B::descriptor(b + k * B::K_STEP / 16), k > 0 ? 1 : add);
            }
        }
        wgmma_commit();
        ring.next();
    };
    const auto let_go = [&] {
        release<S>(memory, read.stage);
        read.next();
    };
    // ORDER: ascending K, one chain. The first block stands before the loop: ptxas runs wgmma one
    // by one if two paths with other accumulators join between its fence and its wait.
    block(continues);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
        block(1);
        wgmma_wait<S::AHEAD>();
        if (step >= S::AHEAD) let_go();
    }
    // All of this tile has arrived: the other warpgroup may wait for its own.
    if (S::TURNS && threadIdx.x % 32 == 0) barrier_arrive(memory.turn + (group ^ 1));
    wgmma_wait<0>();
    for (int step = min(steps, S::AHEAD); step > 0; --step) let_go();
}

// Tile after tile of warpgroup `group`.
template <typename T, typename S>
__device__ __forceinline__ void consume(const WgmmaMemory<S>& memory, const WgmmaPlaces<S>& places,
                                        const WgmmaCall& p, int steps, int group) {
    constexpr int MI = S::MI, BN = S::BN, EVERY = S::TURNS ? 2 : 1;
    const int warp = threadIdx.x / 32 % 4;
    unsigned char* buffer = memory.outgoing + (group * 4 + warp) * Outgoing<BN>::BYTES;
    Ring<S::STAGES> ring;
    // In turns, the stages of the other warpgroup's tile come between.
    if (S::TURNS && group == 1) ring.skip(steps);
    int unit = places.first + (S::TURNS ? group * places.stride : 0), count = 0;
    for (; unit < places.units; unit += EVERY * places.stride, ++count) {
        int tile_row, column;
        places.find(unit, tile_row, column);
        const long long row =
            (long long)tile_row + (S::TURNS ? 0 : group * S::ROWS_A_GROUP) + warp * MMA_ROWS;
        ColumnBias<BN> column_bias;
        if (p.bias != nullptr) column_bias.load(p, column);
        float acc[MI][BN / 2];
        const bool continues = p.initial != nullptr;
        if (continues) start_chains<MI, BN>(p, row, column, acc);
        if (S::TURNS) barrier_wait(memory.turn + group, (group ^ 1 ^ count) & 1);
        multiply_tile<T, S>(memory, ring, steps, group, continues, acc);
        if (S::TURNS) ring.skip(steps);

        float* biases = memory.biases + (group * 2 + (count & 1)) * BN;
        if (p.bias != nullptr) {
            column_bias.share(p, biases);
            // One barrier: who overwrites these two tiles on has seen all pass the next.
            warpgroup_sync(1 + group);
            store<T, MI, BN>(p, acc, Ending<MI, true>(p, biases, row), buffer, row, column);
        } else {
            store<T, MI, BN>(p, acc, Ending<MI, false>(p, biases, row), buffer, row, column);
        }
    }
}

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    chain_wgmma(const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b, const __grid_constant__ WgmmaCall p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char wgmma_memory[];
    const WgmmaMemory<S> memory(wgmma_memory);
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_b);
        memory.init_barriers();
    }
    __syncwarp();
    if constexpr (S::CLUSTER > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    const WgmmaPlaces<S> places(p);
    const int steps = (int)((p.K + WGMMA_BK - 1) / WGMMA_BK);
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    // Registers: those of three warpgroups are shared out anew, 40 and twice 232 of 504.
    if (group == 0) {
        if constexpr (S::GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
        if (warp == 0) produce<S, true>(memory, places, map_a, p.a_parts, steps);
        if (warp == 1) produce<S, false>(memory, places, map_b, p.b_parts, steps);
    } else {
        if constexpr (S::GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<T, S>(memory, places, p, steps, group - 1);
    }
    // No block may leave while another arrives at its barriers or writes to its tiles.
    __syncwarp();
    if constexpr (S::CLUSTER > 1) cluster_sync();
#endif
}

}  // namespace
}  // namespace rlk
