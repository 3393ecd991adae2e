#include <algorithm>

#include "block.cuh"
#include "kernels.h"
#include "reduce_channel.cuh"

namespace jdp {
namespace {

// Lower bound with all ranks on one GPU, ignoring its cache: the bytes that a rank moves through
// device memory for S bytes of f32, in steps of S / n.
//
//   ring         send 2, recv_reduce_send 3 (n - 2 times), recv_reduce_copy_send 4, recv_copy_send
//   3 (n - 2 times), keep 2
//                (6 n - 4) / n S: 4.0, 5.0, 5.5 S for n = 2, 4, 8
//   two-shot     push 2 (n - 1), finish n + 1 + (n - 1), keep 2 (n - 1)
//                (6 n - 4) / n S
//   one-shot     push n, finish n + 1: 2 n + 1 S
//
// n = 8, S = 64 MiB: 44 S = 2.95 GB, 687 us at the 4.3 TB/s of a copy on an H200. Between GPUs the
// link is the bound: 2 (n - 1) / n S sent by each GPU, 112 MiB, 261 us at 450 GB/s.
//
// One block per multiprocessor: two would leave 64 registers per thread, and the compiler spills.
template <typename T, Algorithm kAlgorithm>
__global__ __launch_bounds__(kThreadsPerBlock,
                             1) void reduce_kernel(const __grid_constant__ Arguments arguments) {
  reduce_channel<T, kAlgorithm>(arguments, blockIdx.x, CudaBlock());
}

__global__ void copy_kernel(const __grid_constant__ Arguments arguments) {
  const Span span = chunk_span(blockIdx.x, gridDim.x, 0, arguments.num_vectors, 1);
  for_each_vector<uint8_t>(
      CudaBlock(), arguments, span,
      [&](const Segment& segment, int32_t v, auto whole) {
        return load_own<uint8_t>(segment, v, whole);
      },
      [&](const Segment& segment, int32_t v, auto whole, const Vector<uint8_t>& loaded) {
        store_own<uint8_t>(segment, v, loaded, whole);
      });
}

__global__ void probe_write_kernel(const __grid_constant__ Arguments arguments,
                                   uint32_t* num_wrong) {
  const int peer = threadIdx.x;
  const CudaBlock block;
  uint32_t* word = &arguments.staging[peer].rank()->probe[arguments.rank];
  const uint32_t pattern = probe_pattern(arguments.rank, peer);
  block.store_release(word, pattern);
  if (block.load_acquire(word) != pattern) atomicAdd(num_wrong, 1);
}

__global__ void probe_read_kernel(const __grid_constant__ Arguments arguments,
                                  uint32_t* num_wrong) {
  const int peer = threadIdx.x;
  const uint32_t* word = &arguments.staging[arguments.rank].rank()->probe[peer];
  if (CudaBlock().load_acquire(word) != probe_pattern(peer, arguments.rank)) {
    atomicAdd(num_wrong, 1);
  }
}

using Kernel = void (*)(Arguments);

template <typename T>
Kernel kernel_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kRing:
      return reduce_kernel<T, Algorithm::kRing>;
    case Algorithm::kOneShot:
      return reduce_kernel<T, Algorithm::kOneShot>;
    case Algorithm::kTwoShot:
      return reduce_kernel<T, Algorithm::kTwoShot>;
  }
  return nullptr;
}

Kernel kernel_of(Type type, Algorithm algorithm) {
  switch (type) {
    case Type::kF32:
      return kernel_of<float>(algorithm);
    case Type::kF64:
      return kernel_of<double>(algorithm);
    case Type::kBF16:
      return kernel_of<BFloat16>(algorithm);
    case Type::kF16:
      return kernel_of<Float16>(algorithm);
    case Type::kU8:
      return kernel_of<uint8_t>(algorithm);
    case Type::kU16:
      return kernel_of<uint16_t>(algorithm);
    case Type::kU32:
      return kernel_of<uint32_t>(algorithm);
    case Type::kU64:
      return kernel_of<uint64_t>(algorithm);
  }
  return nullptr;
}

template <typename Visit>
cudaError_t for_each_reduce_kernel(Visit visit) {
  for (int type = 0; type <= static_cast<int>(Type::kU64); ++type) {
    for (int algorithm = 0; algorithm <= static_cast<int>(Algorithm::kTwoShot); ++algorithm) {
      const Kernel kernel = kernel_of(static_cast<Type>(type), static_cast<Algorithm>(algorithm));
      const cudaError_t error = visit(reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t load(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace

cudaError_t load_kernels() {
  const void* others[] = {reinterpret_cast<const void*>(copy_kernel),
                          reinterpret_cast<const void*>(probe_write_kernel),
                          reinterpret_cast<const void*>(probe_read_kernel)};
  for (const void* kernel : others) {
    const cudaError_t error = load(kernel);
    if (error != cudaSuccess) return error;
  }
  return for_each_reduce_kernel(load);
}

cudaError_t count_resident_blocks(int* num_blocks) {
  int device;
  int num_multiprocessors;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  *num_blocks = 1 << 30;
  return for_each_reduce_kernel([&](const void* kernel) {
    int here = 0;
    const cudaError_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&here, kernel, kThreadsPerBlock, 0);
    if (error == cudaSuccess) *num_blocks = std::min(*num_blocks, here * num_multiprocessors);
    return error;
  });
}

cudaError_t launch(Type type, const Arguments& arguments, cudaStream_t stream) {
  kernel_of(type, arguments.algorithm)<<<arguments.num_channels, kThreadsPerBlock, 0, stream>>>(
      arguments);
  return cudaGetLastError();
}

cudaError_t launch_copy(const Arguments& arguments, cudaStream_t stream) {
  constexpr int64_t kVectorsPerBlock = 4 * kThreadsPerBlock;
  const int64_t wanted = (arguments.num_vectors + kVectorsPerBlock - 1) / kVectorsPerBlock;
  const int num_blocks = static_cast<int>(std::clamp<int64_t>(wanted, 1, 1024));
  copy_kernel<<<num_blocks, kThreadsPerBlock, 0, stream>>>(arguments);
  return cudaGetLastError();
}

cudaError_t launch_probe_write(const Arguments& arguments, uint32_t* num_wrong,
                               cudaStream_t stream) {
  probe_write_kernel<<<1, arguments.layout.num_ranks, 0, stream>>>(arguments, num_wrong);
  return cudaGetLastError();
}

cudaError_t launch_probe_read(const Arguments& arguments, uint32_t* num_wrong,
                              cudaStream_t stream) {
  probe_read_kernel<<<1, arguments.layout.num_ranks, 0, stream>>>(arguments, num_wrong);
  return cudaGetLastError();
}

}  // namespace jdp
