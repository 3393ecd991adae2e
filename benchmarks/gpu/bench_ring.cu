// Measures the kernels with all ranks on one GPU, and prints JSON lines.
//
// Times are medians over replays of a CUDA graph of several consecutive launches, divided by their
// number: the time of a launch between two others, without the host. Leaves are reduced in place,
// as in a jdp step. Before each replay the leaves get new numbers, and after it every element on
// every rank is compared with the exact result. A wrong element ends the program.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "cuda/plan.h"
#include "virtual_ranks.cuh"
#include "whole_numbers.h"

namespace jdp {
namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int kReplays = 15;
constexpr int kWarmUp = 2;
constexpr int kCopyBlocks = 1024;

const char* const kNames[] = {"ring", "one-shot", "two-shot"};

// Bytes that a rank moves through device memory for each byte reduced: see kernels.cu.
double floor_factor(Algorithm algorithm, int num_ranks) {
  if (algorithm == Algorithm::kOneShot) return 2.0 * num_ranks + 1;
  return (6.0 * num_ranks - 4) / num_ranks;
}

// The functions of a replay, of which only `launch` is timed.
struct Timed {
  int num_calls;  // number of consecutive launches
  std::function<void()> launch;
  std::function<void(int round)> prepare;
  std::function<void(int round)> check;
};

// Returns the microseconds of one call.
double time_us(cudaStream_t stream, const Timed& timed) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int call = 0; call < timed.num_calls; ++call) timed.launch();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin;
  cudaEvent_t end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times_ms;
  for (int round = 0; round < kWarmUp + kReplays; ++round) {
    timed.prepare(round);
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    float time_ms;
    CHECK_CUDA(cudaEventElapsedTime(&time_ms, begin, end));
    if (round >= kWarmUp) times_ms.push_back(time_ms);
    timed.check(round);
  }
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  std::nth_element(times_ms.begin(), times_ms.begin() + kReplays / 2, times_ms.end());
  return 1000 * times_ms[kReplays / 2] / timed.num_calls;
}

// Each block copies a part of its own, with as many loads under way as registers hold.
__global__ void copy(const int4* from, int4* to, int64_t num_vectors) {
  constexpr int kUnrolled = 8;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (; i + (kUnrolled - 1) * stride < num_vectors; i += kUnrolled * stride) {
    int4 loaded[kUnrolled];
#pragma unroll
    for (int k = 0; k < kUnrolled; ++k) loaded[k] = __ldcs(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < kUnrolled; ++k) __stcs(to + i + k * stride, loaded[k]);
  }
  for (; i < num_vectors; i += stride) to[i] = from[i];
}

// data: [num_ranks, size].
template <typename T>
__global__ void fill(T* data, int64_t size, WholeNumbers numbers) {
  const int64_t end = numbers.num_ranks * size;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < end;
       i += int64_t{gridDim.x} * blockDim.x) {
    data[i] = numbers.input<T>(static_cast<int>(i / size), i % size);
  }
}

struct Wrong {
  unsigned long long count;
  unsigned long long first;
};

template <typename T>
__global__ void find_wrong(const T* data, int64_t size, WholeNumbers numbers, Wrong* wrong) {
  const int64_t end = numbers.num_ranks * size;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < end;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (numbers.is_right(data[i], static_cast<int>(i / size), i % size)) continue;
    atomicAdd(&wrong->count, 1);
    atomicMin(&wrong->first, static_cast<unsigned long long>(i));
  }
}

// Also on standard output, where the reader of the lines finds it.
[[noreturn]] void end_with(const std::string& error) {
  printf("{\"kind\": \"wrong\", \"error\": \"%s\"}\n", error.c_str());
  fflush(stdout);
  fprintf(stderr, "%s Its times would be meaningless, so the benchmark stops.\n", error.c_str());
  exit(1);
}

class Bench {
 public:
  Bench() {
    CHECK_CUDA(cudaStreamCreate(&stream_));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), kMaxTotal));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&scale_), sizeof(double)));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&wrong_), sizeof *wrong_));
    time_copy(kMaxTotal / 2);
  }

  template <typename T>
  void run(const char* kind, const char* type, Algorithm algorithm, int num_ranks, int64_t bytes,
           int num_channels, int64_t slot_bytes) {
    Layout layout = {num_ranks, num_channels, slot_bytes, 32 * kKiB};
    VirtualRanks ranks(layout);
    ranks.set_arguments(arguments_of<T>(layout, algorithm, bytes));
    const VirtualKernel kernel = virtual_kernel_of<T>(algorithm);
    if (!ranks.fits(kernel)) return;
    const int num_calls = bytes <= kMiB ? 50 : bytes <= 32 * kMiB ? 10 : 3;
    const std::string what = std::string(kNames[static_cast<int>(algorithm)]) + " of " + type +
                             ", " + std::to_string(num_ranks) + " ranks, " + std::to_string(bytes) +
                             " bytes";
    T* data = reinterpret_cast<T*>(data_);
    Timed timed = {num_calls, [&] { ranks.launch(kernel, stream_); }, nullptr, nullptr};
    timed.prepare = [&](int round) { put_in(data, bytes, {num_ranks, round, 0}); };
    timed.check = [&](int round) {
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (ranks.report(rank).outcome == 0) continue;
        end_with(what + ": rank " + std::to_string(rank) + " gave up in round " +
                 std::to_string(round) + ".");
      }
      require(what, data, bytes, {num_ranks, round, num_calls});
    };
    const double us = time_us(stream_, timed);
    const double floor_us = num_ranks * floor_factor(algorithm, num_ranks) * bytes / bytes_per_us_;
    printf(
        "{\"kind\": \"%s\", \"type\": \"%s\", \"algorithm\": \"%s\", \"num_ranks\": %d, "
        "\"bytes\": %lld, \"num_channels\": %d, \"slot_bytes\": %lld, \"us\": %.2f, "
        "\"floor_us\": %.2f, \"fraction\": %.3f}\n",
        kind, type, kNames[static_cast<int>(algorithm)], num_ranks, static_cast<long long>(bytes),
        num_channels, static_cast<long long>(slot_bytes), us, floor_us, floor_us / us);
    fflush(stdout);
  }

 private:
  static constexpr int64_t kMaxTotal = 8 * 256 * kMiB;

  // cudaMemcpy reaches two thirds of this in a graph.
  void time_copy(int64_t bytes) {
    float* from = reinterpret_cast<float*>(data_);
    float* to = reinterpret_cast<float*>(data_ + bytes);
    Timed timed = {4, nullptr, nullptr, nullptr};
    timed.launch = [&] {
      copy<<<kCopyBlocks, 512, 0, stream_>>>(reinterpret_cast<const int4*>(from),
                                             reinterpret_cast<int4*>(to), bytes / 16);
      CHECK_CUDA(cudaGetLastError());
    };
    timed.prepare = [&](int round) { put_in(from, bytes, {1, round, 0}); };
    timed.check = [&](int round) { require("copy", to, bytes, {1, round, 0}); };
    const double us = time_us(stream_, timed);
    bytes_per_us_ = 2 * bytes / us;
    printf("{\"kind\": \"copy\", \"bytes\": %lld, \"us\": %.1f, \"tb_per_s\": %.3f}\n",
           static_cast<long long>(bytes), us, bytes_per_us_ / 1e6);
  }

  template <typename T>
  std::vector<Arguments> arguments_of(const Layout& layout, Algorithm algorithm, int64_t bytes) {
    using Scale = typename Element<T>::Scale;
    const Scale scale = static_cast<Scale>(WholeNumbers{layout.num_ranks, 0, 0}.scale());
    CHECK_CUDA(cudaMemcpy(scale_, &scale, sizeof scale, cudaMemcpyDefault));
    std::vector<Arguments> all(layout.num_ranks);
    for (int rank = 0; rank < layout.num_ranks; ++rank) {
      Arguments& one = all[rank];
      one = {};
      one.layout = layout;
      one.scale = scale_;
      one.timeout_ns = 5'000'000'000;
      one.rank = rank;
      one.num_channels = layout.num_channels;
      one.algorithm = algorithm;
      one.num_vectors = static_cast<int32_t>(bytes / 16);
      one.num_segments = 1;
      char* leaf = data_ + rank * bytes;
      one.segments[0] = {leaf, leaf, bytes / static_cast<int64_t>(sizeof(T)), 0};
    }
    return all;
  }

  // `bytes`: size of one rank's leaves.
  template <typename T>
  void put_in(T* data, int64_t bytes, const WholeNumbers& numbers) {
    fill<<<1024, 512, 0, stream_>>>(data, bytes / sizeof(T), numbers);
    CHECK_CUDA(cudaGetLastError());
  }

  template <typename T>
  void require(const std::string& what, const T* data, int64_t bytes, const WholeNumbers& numbers) {
    const int64_t size = bytes / sizeof(T);
    Wrong wrong = {0, ~0ull};
    CHECK_CUDA(cudaMemcpy(wrong_, &wrong, sizeof wrong, cudaMemcpyDefault));
    find_wrong<<<1024, 512, 0, stream_>>>(data, size, numbers, wrong_);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    CHECK_CUDA(cudaMemcpy(&wrong, wrong_, sizeof wrong, cudaMemcpyDefault));
    if (wrong.count == 0) return;
    end_with(what + ": " + std::to_string(wrong.count) + " of " +
             std::to_string(numbers.num_ranks * size) + " elements are wrong in round " +
             std::to_string(numbers.round) + ", the first on rank " +
             std::to_string(wrong.first / size) + ", element " +
             std::to_string(wrong.first % size) + ".");
  }

  cudaStream_t stream_;
  char* data_;
  void* scale_;
  Wrong* wrong_;
  double bytes_per_us_;
};

}  // namespace
}  // namespace jdp

int main() {
  using jdp::Algorithm;
  using jdp::kKiB;
  using jdp::kMiB;
  int num_multiprocessors;
  CHECK_CUDA(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  jdp::Bench bench;
  for (int num_ranks : {2, 4, 8}) {
    for (int64_t bytes = kKiB; bytes <= 32 * kKiB; bytes *= 2) {
      bench.run<float>("latency", "float32", Algorithm::kOneShot, num_ranks, bytes,
                       bytes <= 8 * kKiB ? 1 : 4, 64 * kKiB);
    }
    for (int64_t bytes = 64 * kKiB; bytes <= 256 * kMiB; bytes *= 4) {
      // As many as a plan chooses, but no more than are resident at once.
      const int num_channels =
          static_cast<int>(std::min<int64_t>(num_multiprocessors / num_ranks, bytes / (8 * kKiB)));
      for (Algorithm algorithm : {Algorithm::kRing, Algorithm::kOneShot, Algorithm::kTwoShot}) {
        bench.run<float>("size", "float32", algorithm, num_ranks, bytes, num_channels, 256 * kKiB);
      }
    }
  }
  for (Algorithm algorithm : {Algorithm::kRing, Algorithm::kTwoShot}) {
    const int num_channels = num_multiprocessors / 8;
    bench.run<double>("type", "float64", algorithm, 8, 64 * kMiB, num_channels, 256 * kKiB);
    bench.run<jdp::BFloat16>("type", "bfloat16", algorithm, 8, 64 * kMiB, num_channels, 256 * kKiB);
    bench.run<jdp::Float16>("type", "float16", algorithm, 8, 64 * kMiB, num_channels, 256 * kKiB);
  }
  // Variants for the choice of defaults.
  for (int num_channels : {4, 8, 12, 16}) {
    for (int64_t slot_bytes : {32 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB, 512 * kKiB}) {
      bench.run<float>("variant", "float32", Algorithm::kRing, 8, 64 * kMiB, num_channels,
                       slot_bytes);
    }
  }
}
