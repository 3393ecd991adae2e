// Several processes on one GPU, connected by CUDA IPC:
//
//     several_processes [num_ranks]
//
// The GPU runs one process at a time, so this tests correctness, not speed.

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/communicator.h"

namespace {

using jdp::Communicator;
using jdp::Leaf;
using jdp::Status;

constexpr double kTimeoutS = 20;

void check(bool good, const char* what, int rank) {
  if (good) return;
  fprintf(stderr, "rank %d: %s\n", rank, what);
  exit(1);
}

void check(const Status& status, int rank) { check(status.ok(), status.message.c_str(), rank); }

void check(cudaError_t error, int rank) {
  check(error == cudaSuccess, cudaGetErrorString(error), rank);
}

// Sends bytes from every rank to every rank, through the parent. Also serves as the barrier.
class Exchange {
 public:
  Exchange(int in, int out, int num_ranks) : in_(in), out_(out), num_ranks_(num_ranks) {}

  template <typename T>
  std::vector<T> all(const T& mine) {
    std::vector<T> everyone(num_ranks_);
    if (write(out_, &mine, sizeof mine) != sizeof mine) exit(1);
    char* place = reinterpret_cast<char*>(everyone.data());
    for (size_t got = 0; got < num_ranks_ * sizeof(T);) {
      const ssize_t more = read(in_, place + got, num_ranks_ * sizeof(T) - got);
      if (more <= 0) exit(1);
      got += more;
    }
    return everyone;
  }
  void barrier() { all<char>(0); }

 private:
  const int in_;
  const int out_;
  const size_t num_ranks_;
};

struct Buffers {
  std::vector<Leaf> leaves;
  float* scale;
};

// Small integers, so that sums are exact in any order.
float value(int rank, int leaf, int64_t i) { return static_cast<float>((rank + leaf + i) % 13); }

Buffers make_buffers(int rank, const std::vector<int64_t>& sizes) {
  Buffers buffers;
  for (size_t leaf = 0; leaf < sizes.size(); ++leaf) {
    std::vector<float> host(sizes[leaf]);
    for (int64_t i = 0; i < sizes[leaf]; ++i) host[i] = value(rank, leaf, i);
    void* data;
    check(cudaMalloc(&data, host.size() * sizeof(float)), rank);
    check(cudaMemcpy(data, host.data(), host.size() * sizeof(float), cudaMemcpyDefault), rank);
    buffers.leaves.push_back({data, sizes[leaf]});
  }
  const float scale = 0.5f;
  check(cudaMalloc(reinterpret_cast<void**>(&buffers.scale), sizeof scale), rank);
  check(cudaMemcpy(buffers.scale, &scale, sizeof scale, cudaMemcpyDefault), rank);
  return buffers;
}

void check_sums(int rank, int num_ranks, const Buffers& buffers) {
  for (size_t leaf = 0; leaf < buffers.leaves.size(); ++leaf) {
    std::vector<float> host(buffers.leaves[leaf].size);
    check(cudaMemcpy(host.data(), buffers.leaves[leaf].data, host.size() * sizeof(float),
                     cudaMemcpyDefault),
          rank);
    for (size_t i = 0; i < host.size(); ++i) {
      float sum = 0;
      for (int other = 0; other < num_ranks; ++other) sum += value(other, leaf, i);
      check(host[i] == 0.5f * sum, "a sum is wrong", rank);
    }
  }
}

void run_rank(int rank, int num_ranks, Exchange exchange) {
  jdp::set_timeout_s(kTimeoutS);
  std::unique_ptr<Communicator> communicator;
  check(
      Communicator::open({0, rank, num_ranks, jdp::Topology::kSameDevice, 64 << 20}, &communicator),
      rank);
  jdp::Blob blob;
  check(communicator->blob(&blob), rank);
  check(communicator->connect(exchange.all(blob).data()), rank);
  check(communicator->probe_write(), rank);
  exchange.barrier();
  check(communicator->probe_read(), rank);
  exchange.barrier();
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), rank);
  int64_t run = 0;
  // One-shot, two-shot, ring; the last in two launches.
  const std::vector<std::vector<int64_t>> buckets = {
      {1000, 3}, {1 << 20}, {(5 << 20) + 3}, std::vector<int64_t>(100, 17)};
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    const Buffers buffers = make_buffers(rank, buckets[bucket]);
    check(
        communicator->start(run++, bucket, jdp::Type::kF32, buffers.leaves, buffers.scale, stream),
        rank);
    check(communicator->finish(bucket, jdp::Type::kF32, buffers.leaves, buffers.leaves, stream),
          rank);
    check(cudaStreamSynchronize(stream), rank);
    check(communicator->failure(), rank);
    check_sums(rank, num_ranks, buffers);
    exchange.barrier();
  }
  // The last rank does not take part: every other rank must get an error in time.
  jdp::set_timeout_s(2);
  if (rank != num_ranks - 1) {
    const Buffers buffers = make_buffers(rank, {1000});
    const auto begin = std::chrono::steady_clock::now();
    check(communicator->start(run++, 9, jdp::Type::kF32, buffers.leaves, buffers.scale, stream),
          rank);
    check(communicator->finish(9, jdp::Type::kF32, buffers.leaves, buffers.leaves, stream), rank);
    check(cudaStreamSynchronize(stream), rank);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    check(waited.count() < 3.5, "a missing rank was found too late", rank);
    const Status next =
        communicator->start(run++, 10, jdp::Type::kF32, buffers.leaves, buffers.scale, stream);
    check(next.code == jdp::Code::kDeadlineExceeded, "a missing rank was not found", rank);
    if (rank == 0) printf("%s\n", next.message.c_str());
  }
  exchange.barrier();
  check(communicator->reset(), rank);
  exchange.barrier();
  jdp::set_timeout_s(kTimeoutS);
  const Buffers buffers = make_buffers(rank, {997});
  check(communicator->start(run++, 1, jdp::Type::kF32, buffers.leaves, buffers.scale, stream),
        rank);
  check(communicator->finish(1, jdp::Type::kF32, buffers.leaves, buffers.leaves, stream), rank);
  check(cudaStreamSynchronize(stream), rank);
  check_sums(rank, num_ranks, buffers);
  exchange.barrier();
}

// Forwards the ranks' messages until all ranks have ended.
int serve(const std::vector<int>& from, const std::vector<int>& to) {
  std::vector<std::vector<char>> messages(from.size());
  for (;;) {
    for (size_t rank = 0; rank < from.size(); ++rank) {
      messages[rank].resize(sizeof(jdp::Blob));
      const ssize_t got = read(from[rank], messages[rank].data(), messages[rank].size());
      if (got <= 0) return 0;
      messages[rank].resize(got);
    }
    for (int target : to) {
      for (const auto& message : messages) {
        if (write(target, message.data(), message.size()) < 0) return 1;
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int num_ranks = argc > 1 ? atoi(argv[1]) : 2;
  signal(SIGPIPE, SIG_IGN);
  std::vector<int> from;
  std::vector<int> to;
  std::vector<pid_t> children;
  // Before any call to CUDA, which does not survive a fork.
  for (int rank = 0; rank < num_ranks; ++rank) {
    int up[2];
    int down[2];
    if (pipe(up) || pipe(down)) return 1;
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (int end : from) close(end);
      for (int end : to) close(end);
      close(up[0]);
      close(down[1]);
      run_rank(rank, num_ranks, Exchange(down[0], up[1], num_ranks));
      exit(0);
    }
    close(up[1]);
    close(down[0]);
    from.push_back(up[0]);
    to.push_back(down[1]);
    children.push_back(child);
  }
  serve(from, to);
  for (int end : to) close(end);
  int num_failed = 0;
  for (pid_t child : children) {
    int status;
    waitpid(child, &status, 0);
    num_failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  }
  printf("%d of %d processes passed\n", num_ranks - num_failed, num_ranks);
  return num_failed != 0;
}
