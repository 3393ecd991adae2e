#include "rendezvous.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tiles.h"

namespace jdp {
namespace {

// Bytes of a tile in one rank's memory. Smaller tiles are claimed more often; larger ones cost
// waits at the end.
constexpr int64_t kTileBytes = kSlotBytes / 8;  // 64 KiB

// Naps of 20 ms after the deadline.
#ifdef JDP_FUZZ
constexpr int kMaxNapsLate = 10;
#else
constexpr int kMaxNapsLate = 500;
#endif

}  // namespace

std::mutex& rendezvous_mutex() {
  static std::mutex* mutex = new std::mutex;  // outlives threads that still wait at exit
  return *mutex;
}

Rendezvous::Rendezvous(const Call& first, const Bucket& bucket, uint64_t nth)
    : first_(first),
      nth_(nth),
      num_expected_(first.num_ranks),
      buckets_(first.num_ranks),
      is_working_(first.num_ranks) {
  const int64_t element_bytes = visit(bucket.type(), [](auto zero) { return sizeof zero; });
  tile_ = kTileBytes / element_bytes;
  num_tiles_ = (bucket.count() + tile_ - 1) / tile_;
}

std::string Rendezvous::disagreement(const Call& call, const Bucket& bucket) const {
  if (call.num_ranks != first_.num_ranks || call.algorithm != first_.algorithm ||
      call.operation != first_.operation ||
      std::memcmp(&call.scale, &first_.scale, sizeof call.scale) != 0) {
    const auto text = [](const Call& it) {
      return std::to_string(it.num_ranks) + " ranks and scale " + std::to_string(it.scale);
    };
    return "ranks disagree on the operation, the number of ranks, the scale or the algorithm: "
           "rank " +
           std::to_string(first_.rank) + " passed " + text(first_) + ", rank " +
           std::to_string(call.rank) + " " + text(call);
  }
  if (buckets_[call.rank]) {
    return "rank " + std::to_string(call.rank) +
           " joined twice; the calls of one program must be chained by their token";
  }
  if (!bucket.fits(*buckets_[first_.rank])) {
    return "ranks disagree on the leaves' types, sizes or slices: rank " +
           std::to_string(first_.rank) + " passed " +
           std::to_string(buckets_[first_.rank]->count()) + " elements, rank " +
           std::to_string(call.rank) + " " + std::to_string(bucket.count());
  }
  return "";
}

bool Rendezvous::join(const Call& call, const Bucket& bucket) {
  ++num_joined_;
  num_expected_ = std::max(num_expected_, call.num_ranks);
  if (status_.ok()) {
    const std::string what = num_joined_ == 1 ? "" : disagreement(call, bucket);
    if (what.empty()) {
      buckets_[call.rank] = &bucket;
      if (num_joined_ == first_.num_ranks) open();
    } else {
      status_ = invalid(call, nth_, what);
      advance(failed_, 1);
      advance(opened_, 1);
    }
  }
  return num_joined_ == num_expected_;
}

void Rendezvous::open() {
  if (first_.algorithm == Algorithm::kRing) mailboxes_.reset(new Mailbox[first_.num_ranks]);
  advance(opened_, 1);
  if (num_tiles_ == 0) advance(finished_, 1);
}

Status Rendezvous::give_up(const Status& why) {
  const std::lock_guard<std::mutex> lock(rendezvous_mutex());
  if (status_.ok()) {
    status_ = why;
    advance(failed_, 1);
    advance(opened_, 1);
  }
  return status_;
}

Status Rendezvous::failure() {
  const std::lock_guard<std::mutex> lock(rendezvous_mutex());
  return status_;
}

Status Rendezvous::wait_for_ranks(const Call& call) {
  const Stopwatch watch;
  while (!wait_briefly(opened_, 1)) {
    if (!aborted() && !watch.expired()) continue;
    const std::lock_guard<std::mutex> lock(rendezvous_mutex());
    if (reached(opened_, 1)) break;
    std::vector<int> missing;
    for (int rank = 0; rank < call.num_ranks; ++rank) {
      if (!buckets_[rank]) missing.push_back(rank);
    }
    status_ = aborted() ? was_aborted(call, nth_, abort_reason())
                        : timed_out(call, nth_, watch.elapsed_s(), missing);
    advance(failed_, 1);
    advance(opened_, 1);
  }
  // All ranks have joined: only a ring can fail.
  return reached(failed_, 1) ? failure() : Status{};
}

Status Rendezvous::wait_for_neighbour(const Call& call, Counter& counter, uint32_t target,
                                      Neighbour whose) {
  const Stopwatch watch;
  const int step = whose == Neighbour::kNext ? 1 : call.num_ranks - 1;
  while (!wait_briefly(counter, target)) {
    if (reached(failed_, 1)) return failure();
    if (aborted()) return give_up(was_aborted(call, nth_, abort_reason()));
    if (watch.expired()) {
      const int peer = (call.rank + step) % call.num_ranks;
      return give_up(timed_out(call, nth_, watch.elapsed_s(), {peer}));
    }
  }
  return {};
}

void Rendezvous::do_tiles(int rank) {
  is_working_[rank].store(true);
  int64_t num_done = 0;
  for (;; ++num_done) {
    const int64_t tile = next_tile_.fetch_add(1, std::memory_order_relaxed);
    if (tile >= num_tiles_) break;
    pause_at(Stage::kTile);
    // A late rank claims no tile, so it does not read the bucket of a rank that has left.
    const int64_t begin = tile * tile_;
    do_tile(first_, buckets_, begin, std::min(tile_, buckets_[0]->count() - begin));
  }
  is_working_[rank].store(false);
  if (num_done == 0) return;
  pause_at(Stage::kTile);
  if (num_done_.fetch_add(num_done) + num_done == num_tiles_) advance(finished_, 1);
}

Status Rendezvous::take_part(const Call& call, const Bucket& bucket) {
  const Status status = wait_for_ranks(call);
  if (!status.ok()) return status;
  if (call.algorithm == Algorithm::kRing) {
    const int previous = (call.rank + call.num_ranks - 1) % call.num_ranks;
    return ring_through(mailboxes_[call.rank], mailboxes_[previous], bucket, call.scale, call.rank,
                        call.num_ranks, [&](Counter& counter, uint32_t target, Neighbour whose) {
                          return wait_for_neighbour(call, counter, target, whose);
                        });
  }
  do_tiles(call.rank);
  wait_for_tiles(call);
  return {};
}

// All tiles are claimed. Threads that still compute tiles write into every rank's memory, so a rank
// must not return an error before they finish. A thread that does not finish within this time never
// will (a debugger stopped it, or the memory is unmapped), so the process aborts.
void Rendezvous::wait_for_tiles(const Call& call) {
  const Stopwatch watch;
  int num_naps_late = 0;
  while (!wait_briefly(finished_, 1)) {
    // Counts naps, not seconds: after a SIGSTOP all threads of the process need time to run again.
    if (!watch.expired() || ++num_naps_late < kMaxNapsLate) continue;
    std::vector<int> holders;
    for (int rank = 0; rank < call.num_ranks; ++rank) {
      if (is_working_[rank].load()) holders.push_back(rank);
    }
    const Status status = timed_out(call, nth_, watch.elapsed_s(), holders);
    std::fprintf(stderr,
                 "%s\njdp: a thread of %s hangs while it writes into the memory of all ranks of "
                 "this process. Aborting the process.\n",
                 status.message.c_str(), name_ranks(holders).c_str());
    std::abort();
  }
}

}  // namespace jdp
