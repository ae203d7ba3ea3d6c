// SPDX-License-Identifier: Apache-2.0
// The shared memory that a launch gives to a block.
#pragma once

namespace rlk {

// From its start on, as aligned as the copies to it need.
template <typename T> __device__ __forceinline__ T* launched_memory() {
    extern __shared__ __align__(16) unsigned char rlk_launched_memory[];
    return reinterpret_cast<T*>(rlk_launched_memory);
}

}  // namespace rlk
