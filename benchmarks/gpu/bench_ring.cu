// How fast the kernels are with all ranks on one GPU, as JSON lines on standard output.
//
// Times are medians over replays of a CUDA graph of several launches in a row, divided by their
// number: what a launch costs between two others, without the host.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "cuda/plan.h"
#include "virtual_ranks.cuh"

namespace jdp {
namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int kReplays = 15;

const char* const kNames[] = {"ring", "one-shot", "two-shot"};

// Of bytes that a rank moves through device memory for each byte reduced: see ring_kernel.cu.
double floor_factor(Algorithm algorithm, int num_ranks) {
  if (algorithm == Algorithm::kOneShot) return 2.0 * num_ranks + 1;
  return (6.0 * num_ranks - 4) / num_ranks;
}

// Microseconds of one of `num_calls` launches in a row.
double time_us(int num_calls, cudaStream_t stream, const std::function<void()>& launch) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int call = 0; call < num_calls; ++call) launch();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin;
  cudaEvent_t end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times_ms;
  for (int replay = -2; replay < kReplays; ++replay) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    float time_ms;
    CHECK_CUDA(cudaEventElapsedTime(&time_ms, begin, end));
    if (replay >= 0) times_ms.push_back(time_ms);  // the first two warm up
  }
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  std::nth_element(times_ms.begin(), times_ms.begin() + kReplays / 2, times_ms.end());
  return 1000 * times_ms[kReplays / 2] / num_calls;
}

__global__ void fill(float* data, int64_t size, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t bits = (static_cast<uint32_t>(i) + seed) * 2654435761u;
    bits ^= bits >> 15;
    data[i] = static_cast<float>(bits * 2246822519u >> 8) / (1 << 23) - 1;
  }
}

// Counts what is not a number, so what no rank has written.
__global__ void count_nan(const float* data, int64_t size, unsigned long long* count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (isnan(data[i])) atomicAdd(count, 1);
  }
}

class Bench {
 public:
  Bench() {
    CHECK_CUDA(cudaStreamCreate(&stream_));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&in_), kMaxTotal));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&out_), kMaxTotal));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&scale_), sizeof *scale_));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&count_), sizeof *count_));
    const float scale = 0.125f;
    CHECK_CUDA(cudaMemcpy(scale_, &scale, sizeof scale, cudaMemcpyDefault));
    fill<<<1024, 512>>>(in_, kMaxTotal / sizeof(float), 1);
    CHECK_CUDA(cudaDeviceSynchronize());
    const double us = time_us(4, stream_, [&] {
      CHECK_CUDA(cudaMemcpyAsync(out_, in_, kMiB * 1024, cudaMemcpyDeviceToDevice, stream_));
    });
    bytes_per_us_ = 2 * 1024 * kMiB / us;
    printf("{\"kind\": \"copy\", \"bytes\": %lld, \"us\": %.1f, \"tb_per_s\": %.3f}\n",
           static_cast<long long>(kMiB * 1024), us, bytes_per_us_ / 1e6);
  }

  void run(const char* kind, Algorithm algorithm, int num_ranks, int64_t bytes, int num_channels,
           int64_t slot_bytes) {
    Layout layout = {num_ranks, num_channels, slot_bytes, 32 * kKiB};
    VirtualRanks ranks(layout);
    ranks.tell(arguments_of(layout, algorithm, bytes));
    const VirtualKernel kernel = virtual_kernel_of<float>(algorithm);
    if (!ranks.fits(kernel)) return;
    CHECK_CUDA(cudaMemset(out_, 0xff, num_ranks * bytes));
    const int num_calls = bytes <= kMiB ? 50 : bytes <= 32 * kMiB ? 10 : 3;
    const double us = time_us(num_calls, stream_, [&] { ranks.launch(kernel, stream_); });
    check(ranks, num_ranks, bytes);
    const double floor_us = num_ranks * floor_factor(algorithm, num_ranks) * bytes / bytes_per_us_;
    printf(
        "{\"kind\": \"%s\", \"algorithm\": \"%s\", \"num_ranks\": %d, \"bytes\": %lld, "
        "\"num_channels\": %d, \"slot_bytes\": %lld, \"us\": %.2f, \"floor_us\": %.2f, "
        "\"fraction\": %.3f}\n",
        kind, kNames[static_cast<int>(algorithm)], num_ranks, static_cast<long long>(bytes),
        num_channels, static_cast<long long>(slot_bytes), us, floor_us, floor_us / us);
    fflush(stdout);
  }

 private:
  static constexpr int64_t kMaxTotal = 8 * 256 * kMiB;

  std::vector<Arguments> arguments_of(const Layout& layout, Algorithm algorithm, int64_t bytes) {
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
      const int64_t size = bytes / sizeof(float);
      one.num_vectors = static_cast<int32_t>(bytes / 16);
      one.num_segments = 1;
      one.segments[0] = {in_ + rank * size, out_ + rank * size, size, 0};
    }
    return all;
  }

  void check(const VirtualRanks& ranks, int num_ranks, int64_t bytes) {
    CHECK_CUDA(cudaMemset(count_, 0, sizeof *count_));
    count_nan<<<1024, 512>>>(out_, num_ranks * bytes / sizeof(float), count_);
    unsigned long long count;
    CHECK_CUDA(cudaMemcpy(&count, count_, sizeof count, cudaMemcpyDefault));
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (ranks.report(rank).outcome) count += 1;
    }
    if (count == 0) return;
    fprintf(stderr, "%d ranks, %lld bytes: %llu elements were not written, or a rank was late\n",
            num_ranks, static_cast<long long>(bytes), count);
    exit(1);
  }

  cudaStream_t stream_;
  float* in_;
  float* out_;
  float* scale_;
  unsigned long long* count_;
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
      bench.run("latency", Algorithm::kOneShot, num_ranks, bytes, bytes <= 8 * kKiB ? 1 : 4,
                64 * kKiB);
    }
    for (int64_t bytes = 64 * kKiB; bytes <= 256 * kMiB; bytes *= 4) {
      // As a plan would have it, and no more than run at once.
      const int num_channels =
          static_cast<int>(std::min<int64_t>(num_multiprocessors / num_ranks, bytes / (8 * kKiB)));
      for (Algorithm algorithm : {Algorithm::kRing, Algorithm::kOneShot, Algorithm::kTwoShot}) {
        bench.run("size", algorithm, num_ranks, bytes, num_channels, 256 * kKiB);
      }
    }
  }
  // What a default is chosen from.
  for (int num_channels : {4, 8, 12, 16}) {
    for (int64_t slot_bytes : {32 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB, 512 * kKiB}) {
      bench.run("variant", Algorithm::kRing, 8, 64 * kMiB, num_channels, slot_bytes);
    }
  }
}
