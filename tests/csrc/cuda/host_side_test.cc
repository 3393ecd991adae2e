// The host's decisions for GPUs: the barrier of the devices, the number of resident blocks, the
// algorithm.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device_barrier.h"
#include "cuda/plan.h"
#include "cuda/residency.h"

#define CHECK(condition)                                               \
  do {                                                                 \
    if (!(condition)) {                                                \
      fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
      exit(1);                                                         \
    }                                                                  \
  } while (false)

namespace jdp {
namespace {

bool contains(const Status& status, const std::string& text) {
  if (status.message.find(text) != std::string::npos) return true;
  fprintf(stderr, "%s\n", status.message.c_str());
  return false;
}

// No device passes round i before all have reached it.
void all_arrive_before_any_continues(int num_devices) {
  DeviceBarrier barrier;
  for (int i = 0; i < num_devices; ++i) barrier.add_device(i);
  std::vector<int> round(num_devices, 0);
  std::vector<std::thread> threads;
  for (int device = 0; device < num_devices; ++device) {
    threads.emplace_back([&, device] {
      for (int i = 1; i <= 200; ++i) {
        round[device] = i;
        CHECK(barrier.wait(device, "bucket " + std::to_string(i), 30).ok());
        for (int other : round) CHECK(other == i);
        CHECK(barrier.wait(device, "the end", 30).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void a_missing_device_is_named_to_all_others() {
  DeviceBarrier barrier;
  for (int i = 0; i < 4; ++i) barrier.add_device(i);
  Status other;
  std::thread thread([&] { other = barrier.wait(1, "bucket 5", 0); });
  const Status status = barrier.wait(2, "bucket 5", 0.2);
  thread.join();
  CHECK(status.code == Code::kDeadlineExceeded);
  CHECK(contains(status, "device 2 waited"));
  CHECK(contains(status, "bucket 5"));
  CHECK(contains(status, "0, 3 of this process"));
  // The device that came in time, without a deadline, gets the same error, and so do all later
  // calls.
  CHECK(other.message == status.message);
  CHECK(barrier.wait(3, "bucket 5", 30).message == status.message);
  barrier.reset();
  for (int i = 1; i < 4; ++i) barrier.remove_device(i);
  CHECK(barrier.wait(0, "bucket 6", 30).ok());
  CHECK(barrier.remove_device(0));
}

void two_buckets_at_one_barrier_are_both_named() {
  DeviceBarrier barrier;
  barrier.add_device(0);
  barrier.add_device(1);
  Status first;
  std::thread thread([&] { first = barrier.wait(0, "bucket 5", 30); });
  // In either order of arrival, both devices get an error that names both buckets.
  const Status second = barrier.wait(1, "bucket 6", 30);
  thread.join();
  CHECK(contains(second, "bucket 5"));
  CHECK(contains(second, "bucket 6"));
  CHECK(first.message == second.message);
}

void an_abort_ends_a_wait_without_a_deadline() {
  DeviceBarrier barrier;
  barrier.add_device(0);
  barrier.add_device(1);
  std::thread thread([&] { barrier.abort({Code::kAborted, "enough"}); });
  CHECK(barrier.wait(0, "bucket 0", 0).message == "enough");
  thread.join();
}

void blocks_of_all_communicators_count() {
  Residency residency;
  CHECK(residency.reserve(0, 24, 60).ok());
  CHECK(residency.reserve(0, 24, 60).ok());
  const Status full = residency.reserve(0, 24, 60);
  CHECK(full.code == Code::kUnavailable);
  CHECK(contains(full, "GPU 0 runs 60 blocks at once; 48 are reserved"));
  CHECK(contains(full, "24 more"));
  CHECK(residency.reserve(1, 24, 60).ok());
  CHECK(residency.reserve(0, 12, 60).ok());
  residency.release(0, 24);
  CHECK(residency.reserve(0, 24, 60).ok());
  CHECK(!residency.reserve(0, 1, 60).ok());
}

// Sent by each rank, in units of S / n: while it reduces, a ring sends sums, which are twice as
// wide for 16-bit types.
void two_shot_sends_no_more_than_a_ring(int num_ranks) {
  for (int width_of_sum : {1, 2}) {
    const int ring = (num_ranks - 1) * width_of_sum + (num_ranks - 1);
    const int two_shot = 2 * (num_ranks - 1);
    CHECK(two_shot <= ring);
  }
}

void rings_are_for_pcie_and_for_tests() {
  for (int num_ranks : {1, 2, 3, 8, 16}) {
    two_shot_sends_no_more_than_a_ring(num_ranks);
    const Plan nvlink = make_plan(num_ranks, Topology::kNvlink);
    const Plan pcie = make_plan(num_ranks, Topology::kPcie);
    const Plan same = make_plan(num_ranks, Topology::kSameDevice);
    for (int64_t bytes = 16; bytes <= int64_t{1} << 34; bytes *= 2) {
      CHECK(choose(nvlink, bytes) != Algorithm::kRing);
      CHECK(choose(pcie, bytes) != Algorithm::kTwoShot);
      CHECK(num_channels(nvlink, bytes) >= 1);
      CHECK(num_channels(nvlink, bytes) <= nvlink.layout.num_channels);
    }
    CHECK(choose(nvlink, int64_t{1} << 30) == Algorithm::kTwoShot);
    CHECK(choose(pcie, int64_t{1} << 20) == Algorithm::kRing);
    CHECK(choose(same, 1000) == Algorithm::kOneShot);
    CHECK(choose(same, 4 << 20) == Algorithm::kTwoShot);
    CHECK(choose(same, 20 << 20) == Algorithm::kRing);
    for (const Plan& plan : {pcie, same}) CHECK(plan.layout.slot_bytes >= 256);
    CHECK(describe(nvlink).find("ring") == std::string::npos);
    CHECK(describe(pcie).find("two-shot") == std::string::npos);
    CHECK(describe(same).find("ring above") != std::string::npos);
  }
}

}  // namespace
}  // namespace jdp

int main() {
  for (int num_devices : {1, 2, 3, 8}) jdp::all_arrive_before_any_continues(num_devices);
  jdp::a_missing_device_is_named_to_all_others();
  jdp::two_buckets_at_one_barrier_are_both_named();
  jdp::an_abort_ends_a_wait_without_a_deadline();
  jdp::blocks_of_all_communicators_count();
  jdp::rings_are_for_pcie_and_for_tests();
}
