// Several ranks on one GPU: runs the kernels' source with the blocks of one launch split into
// ranks. All blocks must be resident at once, because they wait for each other.

#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cases.h"
#include "cuda/block.cuh"
#include "cuda/reduce_channel.cuh"

#define CHECK_CUDA(call)                                                                         \
  do {                                                                                           \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) {                              \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      exit(1);                                                                                   \
    }                                                                                            \
  } while (false)

namespace jdp {

// In constant memory, like a kernel's parameters.
__constant__ Arguments rank_arguments[kMaxRanks];

template <typename T, Algorithm kAlgorithm>
__global__ __launch_bounds__(kThreadsPerBlock, 1) void virtual_kernel(int num_channels,
                                                                      int missing_rank,
                                                                      uint32_t seed) {
  const int rank = blockIdx.x / num_channels;
  if (rank == missing_rank) return;
  const Arguments& arguments = rank_arguments[rank];
  const int channel = blockIdx.x % num_channels;
  if (seed) {
    // Delay each block by up to 8 us, differently in each call.
    const uint32_t call = arguments.staging[rank].channel(channel)->state.call;
    const uint32_t mixed = (seed + 2654435761u * (blockIdx.x + 1)) ^ (call * 40503u);
    __nanosleep((mixed >> 7) % 8192);
  }
  reduce_channel<T, kAlgorithm>(arguments, channel, CudaBlock());
}

using VirtualKernel = void (*)(int, int, uint32_t);

template <typename T>
VirtualKernel virtual_kernel_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kRing:
      return virtual_kernel<T, Algorithm::kRing>;
    case Algorithm::kOneShot:
      return virtual_kernel<T, Algorithm::kOneShot>;
    case Algorithm::kTwoShot:
      return virtual_kernel<T, Algorithm::kTwoShot>;
  }
  return nullptr;
}

class VirtualRanks {
 public:
  explicit VirtualRanks(const Layout& layout) : layout_(layout) {
    const int64_t bytes = staging_bytes(layout) * layout.num_ranks;
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&staging_), bytes));
    CHECK_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&reports_), layout.num_ranks * sizeof(Report),
                             cudaHostAllocMapped));
    // Not zeros, which would hide a read of uninitialized memory.
    CHECK_CUDA(cudaMemset(staging_, 0xa5, bytes));
    reset(0);
  }
  VirtualRanks(const VirtualRanks&) = delete;
  ~VirtualRanks() {
    cudaFree(staging_);
    cudaFreeHost(reports_);
  }

  void reset(uint32_t first_number, int abort_rank = -1) {
    CHECK_CUDA(cudaDeviceSynchronize());
    memset(reports_, 0, layout_.num_ranks * sizeof(Report));
    if (abort_rank >= 0) reports_[abort_rank].abort = 1;
    const int64_t bytes = flags_bytes(layout_);
    void* aligned = aligned_alloc(128, bytes);  // the alignment of ChannelFlags
    memset(aligned, 0, bytes);
    set_counters(layout_, {static_cast<char*>(aligned)}, first_number);
    for (int rank = 0; rank < layout_.num_ranks; ++rank) {
      CHECK_CUDA(cudaMemcpy(staging(rank).base, aligned, bytes, cudaMemcpyDefault));
    }
    free(aligned);
  }

  // Sets the arguments of the next launches, and fills in the reports and the staging memory of all
  // ranks.
  void set_arguments(std::vector<Arguments> arguments) {
    num_channels_ = arguments[0].num_channels;
    for (int rank = 0; rank < layout_.num_ranks; ++rank) {
      arguments[rank].report = &reports_[rank];
      for (int peer = 0; peer < layout_.num_ranks; ++peer) {
        arguments[rank].staging[peer] = staging(peer);
      }
    }
    CHECK_CUDA(
        cudaMemcpyToSymbol(rank_arguments, arguments.data(), arguments.size() * sizeof(Arguments)));
  }

  void launch(VirtualKernel kernel, cudaStream_t stream, int missing_rank = -1,
              uint32_t seed = 0) const {
    kernel<<<layout_.num_ranks * num_channels_, kThreadsPerBlock, 0, stream>>>(num_channels_,
                                                                               missing_rank, seed);
    CHECK_CUDA(cudaGetLastError());
  }

  // Whether all blocks are resident on the GPU at once.
  bool fits(VirtualKernel kernel) const {
    int num_multiprocessors;
    int here;
    CHECK_CUDA(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&here, kernel, kThreadsPerBlock, 0));
    return layout_.num_ranks * num_channels_ <= here * num_multiprocessors;
  }

  const Report& report(int rank) const { return reports_[rank]; }

 private:
  Staging staging(int rank) const { return {staging_ + rank * staging_bytes(layout_)}; }

  const Layout layout_;
  char* staging_;
  Report* reports_;
  int num_channels_ = 0;
};

}  // namespace jdp
