// The operations of a thread block that the links use: barriers, flags, a clock.
//
// tests/csrc/cuda/host_block.h implements them with host threads, so that the kernels' source also
// runs under ThreadSanitizer.

#pragma once

#include <cstdint>

namespace jdp {

constexpr int kThreadsPerBlock = 512;

struct CudaBlock {
  __device__ int thread() const { return threadIdx.x; }
  __device__ int num_threads() const { return kThreadsPerBlock; }

  __device__ void sync() const { __syncthreads(); }

  // A barrier that returns to every thread whether any thread passed true.
  __device__ bool any(bool said) const { return __syncthreads_or(said); }

  __device__ uint32_t load_acquire(const uint32_t* flag) const {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
  }

  // After a barrier, this publishes the earlier writes of all threads of the block.
  __device__ void store_release(uint32_t* flag, uint32_t value) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
  }

  __device__ uint32_t exchange(uint32_t* flag, uint32_t value) const {
    return atomicExch(flag, value);
  }

  // The same clock on all multiprocessors, at any core frequency.
  __device__ uint64_t now_ns() const {
    uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
  }

  __device__ void pause() const {}
};

}  // namespace jdp
