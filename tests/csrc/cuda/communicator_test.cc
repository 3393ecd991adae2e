// One rank's communicator on a runtime that only records: work is ordered wherever it shares
// memory, and each call of CUDA that fails is reported and leaves nothing behind.

#include "cuda/communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "stand_in/runtime.h"

namespace {

using jdp::Communicator;
using jdp::Leaf;
using jdp::Status;
using jdp::Type;

void require(bool is_right, const std::string& what) {
  if (is_right) return;
  fprintf(stderr, "%s\n", what.c_str());
  exit(1);
}

constexpr int64_t kArenaBytes = 1 << 16;

// The leaves of a bucket, as XLA holds them on its stream.
struct Bucket {
  std::vector<std::vector<float>> memory;
  std::vector<Leaf> leaves;

  explicit Bucket(const std::vector<int>& sizes) {
    memory.reserve(sizes.size());
    for (int size : sizes) {
      memory.emplace_back(std::max(size, 1));
      leaves.push_back({memory.back().data(), size});
    }
  }
  Bucket copy() const {
    std::vector<int> sizes;
    for (const Leaf& leaf : leaves) sizes.push_back(static_cast<int>(leaf.size));
    return Bucket(sizes);
  }
  std::vector<Access> accesses(bool writes) const {
    std::vector<Access> found;
    for (const Leaf& leaf : leaves) {
      const char* begin = static_cast<const char*>(leaf.data);
      found.push_back({begin, begin + 4 * leaf.size, writes});
    }
    return found;
  }
};

struct Gpu {
  Stream xla;
  float scale = 1;
  std::unique_ptr<Communicator> communicator;

  Status open() {
    return Communicator::open({0, 0, 1, jdp::Topology::kSameDevice, kArenaBytes}, &communicator);
  }
  Status connect() {
    jdp::Blob blob;
    JDP_RETURN_IF_ERROR(communicator->blob(&blob));
    JDP_RETURN_IF_ERROR(communicator->connect(&blob));
    JDP_RETURN_IF_ERROR(communicator->probe_write());
    return communicator->probe_read();
  }
  // XLA computes the leaves, and they are reduced.
  Status start(int64_t run, int number, const Bucket& bucket) {
    runtime.enqueue(&xla, "a gradient", bucket.accesses(true));
    return communicator->start(run, number, Type::kF32, bucket.leaves, &scale, &xla);
  }
  // XLA reads the results in place of the leaves, and uses their memory for something else.
  Status finish(int number, const Bucket& started, const Bucket& given) {
    if (&started != &given) {
      std::vector<Access> copied = given.accesses(true);
      for (const Access& read : started.accesses(false)) copied.push_back(read);
      runtime.enqueue(&xla, "a copy of XLA's", copied);
    }
    JDP_RETURN_IF_ERROR(communicator->finish(number, Type::kF32, given.leaves, given.leaves, &xla));
    runtime.enqueue(&xla, "an update", given.accesses(true));
    return {};
  }
  Status step(int64_t run) {
    const Bucket one({3, 70}), other({0, 5});
    JDP_RETURN_IF_ERROR(start(run, 0, one));
    JDP_RETURN_IF_ERROR(start(run, 1, other));
    JDP_RETURN_IF_ERROR(finish(0, one, one));
    return finish(1, other, other);
  }
};

// Steps of random buckets, in random order; some leaves are moved, and some steps abandoned.
void work_that_shares_memory_is_ordered(unsigned seed) {
  runtime = {};
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Gpu gpu;
  require(gpu.open().ok() && gpu.connect().ok(), "it was not opened");
  std::vector<Bucket> buckets, moved, lost;
  lost.reserve(6 * 20);
  int num_moved = 0;
  for (int i = 0; i < 6; ++i) {
    std::vector<int> sizes(1 + below(3));
    for (int& size : sizes) size = below(400);
    if (i == 0) sizes.assign(jdp::kMaxSegments + 3, 1);  // several launches
    buckets.emplace_back(sizes);
    moved.emplace_back(sizes);
  }
  for (int run = 0; run < 20; ++run) {
    const int num_buckets = 1 + below(6);
    const bool is_abandoned = below(5) == 0;
    std::vector<int> order;
    for (int i = 0; i < num_buckets; ++i) order.push_back(i);
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      // XLA frees the memory of an abandoned step, which the reduction may still read.
      if (is_abandoned) lost.push_back(buckets[i].copy());
      const Status status = gpu.start(run, i, is_abandoned ? lost.back() : buckets[i]);
      require(status.ok(), status.message);
    }
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      if (is_abandoned) break;
      const bool is_moved = below(4) == 0;
      num_moved += is_moved;
      const Bucket& given = is_moved ? moved[i] : buckets[i];
      const Status status = gpu.finish(i, buckets[i], given);
      require(status.ok(), status.message);
    }
  }
  require(runtime.race().empty(), "seed " + std::to_string(seed) + ": " + runtime.race());
  // XLA may have overwritten what was reduced.
  require(gpu.communicator->num_repeated() == num_moved, "moved leaves were not reduced again");
  gpu.communicator.reset();
  require(runtime.live.empty(), "something is left");
}

void an_abandoned_step_leaves_room_for_any_other() {
  runtime = {};
  Gpu gpu;
  require(gpu.open().ok(), "it was not opened");
  // Programs of as many bytes as the arena has.
  const Bucket half({kArenaBytes / 8}), whole({kArenaBytes / 4});
  for (int i = 0; i < 2; ++i) require(gpu.start(1, i, half).ok(), "there is no room");
  const Status status = gpu.start(2, 0, whole);
  require(status.ok(), status.message);
  require(!gpu.finish(1, half, half).ok(), "a done of the step before was accepted");
  require(gpu.finish(0, whole, whole).ok(), "it has no start");
}

void a_reset_forgets_what_has_begun_and_waits_for_the_device() {
  runtime = {};
  Gpu gpu;
  require(gpu.open().ok() && gpu.connect().ok(), "it was not opened");
  const Bucket bucket({5});
  require(gpu.start(1, 0, bucket).ok() && gpu.communicator->reset().ok(), "it was not reset");
  // Peers may write its flags now.
  for (size_t i = 0; i < runtime.work.size(); ++i) {
    const bool is_of_xla = runtime.work[i].name == std::string("a gradient");
    require(is_of_xla || runtime.waited[i], std::string("may run: ") + runtime.work[i].name);
  }
  require(!gpu.finish(0, bucket, bucket).ok(), "a done without a start was accepted");
  require(gpu.step(2).ok(), "there is no step after a reset");
}

// Everything that a process does with a communicator.
Status life(Gpu* gpu) {
  JDP_RETURN_IF_ERROR(gpu->open());
  JDP_RETURN_IF_ERROR(gpu->connect());
  JDP_RETURN_IF_ERROR(gpu->step(0));
  JDP_RETURN_IF_ERROR(gpu->communicator->reserve(2 * kArenaBytes));
  return gpu->step(1);
}

void a_call_that_fails_is_reported_and_leaves_nothing_behind() {
  int number = 1;
  for (;; ++number) {
    runtime = {};
    runtime.failing = number;
    Gpu gpu;
    const Status status = life(&gpu);
    runtime.failing = 0;
    const std::string failed = runtime.failed + ", call " + std::to_string(number);
    if (runtime.failed.empty()) {
      require(status.ok(), status.message);
      break;
    }
    // Ranks of one process need no handle.
    require(!status.ok() || runtime.failed == "cudaIpcGetMemHandle", failed + " was not reported");
    if (gpu.communicator) {
      require(gpu.communicator->reset().ok(), failed + ": no reset");
      require(gpu.connect().ok() && gpu.step(2).ok() && gpu.step(3).ok(), failed + ": no step");
      require(runtime.race().empty(), failed + ": " + runtime.race());
    }
    gpu.communicator.reset();
    require(runtime.live.empty(), failed + " left something behind");
  }
  require(number > 500, "too few calls failed");  // an event for each flight alone
  // Blocks are free again: five communicators of 24 blocks fit.
  runtime = {};
  std::vector<Gpu> gpus(6);
  for (int i = 0; i < 6; ++i) require(gpus[i].open().ok() == (i < 5), "blocks are taken");
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 40; ++seed) work_that_shares_memory_is_ordered(seed);
  an_abandoned_step_leaves_room_for_any_other();
  a_reset_forgets_what_has_begun_and_waits_for_the_device();
  a_call_that_fails_is_reported_and_leaves_nothing_behind();
  return 0;
}
