// The meeting of a process's ranks for one collective call.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "cpu_link.h"

namespace jdp {

// Guards all rendezvous.
std::mutex& rendezvous_mutex();

// Once all ranks have joined, every running rank claims and computes tiles of all ranks' leaves, so
// a rank that sleeps or has no core delays no other.
class Rendezvous {
 public:
  // `nth`: of this call among those of its group and bucket.
  Rendezvous(const Call& first, const Bucket& bucket, uint64_t nth);

  // Returns true once all have joined. The caller holds `rendezvous_mutex`.
  bool join(const Call& call, const Bucket& bucket);

  // Waits for the other ranks, and computes tiles.
  Status take_part(const Call& call, const Bucket& bucket);

 private:
  std::string disagreement(const Call& call, const Bucket& bucket) const;
  Status wait_for_ranks(const Call& call);
  Status wait_for_neighbour(const Call& call, Counter& counter, uint32_t target, Neighbour whose);
  Status give_up(const Status& why);
  Status failure();
  void open();
  void do_tiles(int rank);
  void wait_for_tiles(const Call& call);

  const Call first_;
  const uint64_t nth_;
  int num_joined_ = 0;
  int num_expected_;
  std::vector<const Bucket*> buckets_;  // by rank
  int64_t tile_;                        // elements
  int64_t num_tiles_;
  std::unique_ptr<Mailbox[]> mailboxes_;  // of the ring; by sender

  Status status_;   // the error, if any; guarded by `rendezvous_mutex`
  Counter opened_;  // 1: all ranks have joined, or the call failed
  Counter failed_;  // 1: the call failed
  std::atomic<int64_t> next_tile_{0};
  std::atomic<int64_t> num_done_{0};
  std::vector<std::atomic<bool>> is_working_;  // may be computing a tile
  Counter finished_;                           // 1: all tiles are done
};

}  // namespace jdp
