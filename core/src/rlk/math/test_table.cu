// SPDX-License-Identifier: Apache-2.0
// Where BF16 values are in a table, on the CPU: test_table.py.
#include "rlk/test_support/on_host.h"

#include "rlk/math/table_cuda.cuh"

// The values that entries are for, by a block of `threads`; NaN where there is none.
extern "C" void table_entries(int threads, float* entries) {
    on_host::run_grid(dim3(1), threads, [&] {
        rlk::TableIndex::for_each([&](int i, float z) { entries[i] = z; });
    });
}

extern "C" int table_size() { return rlk::TableIndex::ENTRIES; }

// Which entry each of `count` patterns has by itself.
extern "C" void table_single_places(const uint16_t* patterns, long long count, int* entries) {
    for (long long i = 0; i < count; ++i) entries[i] = (int)rlk::TableIndex::of(patterns[i]);
}

// For each of `count` times eight patterns whether all eight have an entry, and which, by the bytes
// to it.
extern "C" void table_places(const uint16_t* patterns, long long count, int* inside, int* entries,
                             int* pairs) {
    for (long long i = 0; i < count; ++i) {
        rlk::Packed<__nv_bfloat16> packed;
        memcpy(&packed, patterns + i * rlk::ELEMENTS, sizeof(packed));
        const rlk::TableIndex index(packed);
        inside[i] = index.inside;
        for (int k = 0; k < rlk::ELEMENTS; ++k) {
            entries[i * rlk::ELEMENTS + k] = (int)index.offset<sizeof(float)>(k);
            pairs[i * rlk::ELEMENTS + k] = (int)index.offset<sizeof(float2)>(k);
        }
    }
}
