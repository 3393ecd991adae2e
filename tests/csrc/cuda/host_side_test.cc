// What the host decides for GPUs: who waits for whom, how many blocks fit, which algorithm.

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

bool says(const Status& status, const std::string& text) {
  if (status.message.find(text) != std::string::npos) return true;
  fprintf(stderr, "%s\n", status.message.c_str());
  return false;
}

// Nobody is through round i before all have come to it.
void all_come_before_any_goes_on(int num_devices) {
  DeviceBarrier barrier;
  for (int i = 0; i < num_devices; ++i) barrier.enter(i);
  std::vector<int> round(num_devices, 0);
  std::vector<std::thread> threads;
  for (int device = 0; device < num_devices; ++device) {
    threads.emplace_back([&, device] {
      for (int i = 1; i <= 200; ++i) {
        round[device] = i;
        CHECK(barrier.join(device, "bucket " + std::to_string(i), 30).ok());
        for (int other : round) CHECK(other == i);
        CHECK(barrier.join(device, "the end", 30).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void one_that_stays_away_is_named_and_the_others_are_told() {
  DeviceBarrier barrier;
  for (int i = 0; i < 4; ++i) barrier.enter(i);
  Status other;
  std::thread thread([&] { other = barrier.join(1, "bucket 5", 0); });
  const Status status = barrier.join(2, "bucket 5", 0.2);
  thread.join();
  CHECK(status.code == Code::kDeadlineExceeded);
  CHECK(says(status, "device 2 waited"));
  CHECK(says(status, "bucket 5"));
  CHECK(says(status, "0, 3 of this process"));
  // The one that came in time, and had no deadline, ends with the same; so does all that follows.
  CHECK(other.message == status.message);
  CHECK(barrier.join(3, "bucket 5", 30).message == status.message);
  barrier.reset();
  for (int i = 1; i < 4; ++i) barrier.leave(i);
  CHECK(barrier.join(0, "bucket 6", 30).ok());
  CHECK(barrier.leave(0));
}

void another_bucket_is_named_with_both() {
  DeviceBarrier barrier;
  barrier.enter(0);
  barrier.enter(1);
  Status first;
  std::thread thread([&] { first = barrier.join(0, "bucket 5", 30); });
  // It may come first, or second; either way both are told both.
  const Status second = barrier.join(1, "bucket 6", 30);
  thread.join();
  CHECK(says(second, "bucket 5"));
  CHECK(says(second, "bucket 6"));
  CHECK(first.message == second.message);
}

void an_abort_ends_a_wait_without_a_deadline() {
  DeviceBarrier barrier;
  barrier.enter(0);
  barrier.enter(1);
  std::thread thread([&] { barrier.abort({Code::kAborted, "enough"}); });
  CHECK(barrier.join(0, "bucket 0", 0).message == "enough");
  thread.join();
}

void blocks_of_all_communicators_of_a_device_are_counted() {
  Residency residency;
  CHECK(residency.take(0, 24, 60).ok());
  CHECK(residency.take(0, 24, 60).ok());
  const Status full = residency.take(0, 24, 60);
  CHECK(full.code == Code::kUnavailable);
  CHECK(says(full, "GPU 0 runs 60 blocks at once; 48 belong"));
  CHECK(says(full, "24 more"));
  CHECK(residency.take(1, 24, 60).ok());
  CHECK(residency.take(0, 12, 60).ok());
  residency.give_back(0, 24);
  CHECK(residency.take(0, 24, 60).ok());
  CHECK(!residency.take(0, 1, 60).ok());
}

// By each rank in units of S / n: a ring sends sums (twice as wide for 16 bits) while it reduces.
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
  for (int num_devices : {1, 2, 3, 8}) jdp::all_come_before_any_goes_on(num_devices);
  jdp::one_that_stays_away_is_named_and_the_others_are_told();
  jdp::another_bucket_is_named_with_both();
  jdp::an_abort_ends_a_wait_without_a_deadline();
  jdp::blocks_of_all_communicators_of_a_device_are_counted();
  jdp::rings_are_for_pcie_and_for_tests();
}
