#include "segment_call.h"

#include <algorithm>
#include <cstring>

#include "progress.h"
#include "reduce.h"

namespace jdp {
namespace {

// Up to this size, reading all data from all ranks beats waiting twice.
constexpr int64_t kOneShotBytes = kSlotBytes / 16;  // 32 KiB

}  // namespace

template <typename T>
Status SegmentCall::all_reduce() {
  constexpr int64_t kSize = sizeof(T);
  one_shot_ = bucket_.count() * kSize <= kOneShotBytes;
  const int64_t width = Slot::kBytes / kSize;
  // An empty bucket takes one round, which compares the signatures.
  const int64_t num_rounds = std::max<int64_t>(1, (bucket_.count() + width - 1) / width);
  const auto span = [&](int64_t round) {
    return Span{round * width, std::min(width, bucket_.count() - round * width)};
  };
  Status status;
  for (int64_t i = 0; status.ok() && i < num_rounds + 2; ++i) {
    if (i < num_rounds) publish<T>(i, span(i));
    if (i >= 1 && i <= num_rounds) status = reduce_chunk<T>(i - 1, span(i - 1));
    if (status.ok() && i >= 2) status = gather<T>(i - 2, span(i - 2));
  }
  return status;
}

template <typename T>
Span SegmentCall::chunk(int rank, Span span) const {
  if (one_shot_) return rank == call_.rank ? span : Span{span.begin, 0};
  return chunk_span(rank, call_.num_ranks, span.begin, span.size, 64 / sizeof(T));
}

// Why a rank may write into a slot without waiting, although the slot was last used three rounds
// ago, in round r:
//
// `signature` and `data` are written when round r + 3 begins, and read by all ranks when they
// reduce round r. If round r has a gather stage, this rank has completed it, and saw then that all
// ranks have reduced r. Otherwise r is the last round of its call (one-shot, a ring, or any
// operation but an all-reduce), and r + 1 is the first round of the next call. A rank sends at most
// two rounds of a call, here r + 1 and r + 2, before it sees that all ranks have sent the first of
// them, and so have left the previous call. `in_rounds` waits for the earlier rounds of a
// reduce-scatter or all-gather.
//
// `result` is written by reduce_chunk of round r + 3, after all ranks have sent r + 3, and read by
// the others when they gather r. A rank that has sent r + 3 has gathered r: in the previous
// iteration if both rounds belong to one call, else before it left the call of r.
void SegmentCall::sign(uint32_t round) {
  Slot& own = slot(call_.rank, round);
  own.signature = {bucket_.fingerprint(), bucket_.count(), nth_,           call_.scale,
                   call_.bucket,          call_.algorithm, call_.operation};
  if (round == 0) own.entered_ns = now_ns();
}

template <typename T>
void SegmentCall::publish(uint32_t round, Span span) {
  sign(round);
  T* to = data<T>(call_.rank, round);
  const auto copy = [&](int64_t begin, int64_t end) {
    bucket_.pieces(begin, end - begin, [&](size_t index, int64_t first, int64_t size, int64_t at) {
      std::memcpy(to + (begin - span.begin) + at,
                  static_cast<const T*>(bucket_.leaf(index).in) + first, size * sizeof(T));
    });
  };
  const Span own = chunk<T>(call_.rank, span);
  if (one_shot_) {
    copy(span.begin, span.begin + span.size);
  } else {
    copy(span.begin, own.begin);
    copy(own.begin + own.size, span.begin + span.size);
  }
  pause_at(Stage::kPublish);
  advance_sent(round);
}

void SegmentCall::advance_sent(uint32_t round) {
  own_.num_rounds = base_ + round + 1;
  advance(own_.sent, after(round));
}

template <typename T>
Status SegmentCall::reduce_chunk(uint32_t round, Span span) {
  const Status status = wait_for_round(round);
  if (!status.ok()) return status;
  const Span own = chunk<T>(call_.rank, span);
  const bool is_shared = !one_shot_ && call_.num_ranks > 1;
  std::vector<const T*> inputs(call_.num_ranks);
  bucket_.pieces(own.begin, own.size, [&](size_t index, int64_t first, int64_t size, int64_t at) {
    const int64_t offset = own.begin - span.begin + at;
    for (int rank = 0; rank < call_.num_ranks; ++rank) {
      inputs[rank] = data<T>(rank, round) + offset;
    }
    const Leaf& leaf = bucket_.leaf(index);
    inputs[call_.rank] = static_cast<const T*>(leaf.in) + first;
    T* const outputs[] = {static_cast<T*>(leaf.out) + first, result<T>(call_.rank, round) + at};
    reduce<T>(inputs.data(), call_.num_ranks, outputs, is_shared ? 2 : 1, size,
              static_cast<typename Element<T>::Scale>(call_.scale));
  });
  pause_at(Stage::kReduce);
  advance(own_.reduced, after(round));
  return status;
}

template <typename T>
Status SegmentCall::gather(uint32_t round, Span span) {
  if (one_shot_) return {};
  const Status status = wait_for_all(&Seat::reduced, after(round));
  if (!status.ok()) return status;
  for (int step = 1; step < call_.num_ranks; ++step) {
    pause_at(Stage::kGather);
    const int rank = (call_.rank + step) % call_.num_ranks;
    const Span theirs = chunk<T>(rank, span);
    const T* from = result<T>(rank, round);
    bucket_.pieces(theirs.begin, theirs.size,
                   [&](size_t index, int64_t first, int64_t size, int64_t at) {
                     std::memcpy(static_cast<T*>(bucket_.leaf(index).out) + first, from + at,
                                 size * sizeof(T));
                   });
  }
  return status;
}

Status SegmentCall::ring() {
  // One empty round compares the signatures; the mailboxes carry the data.
  sign(0);
  advance_sent(0);
  const Status status = wait_for_round(0);
  if (!status.ok()) return status;
  advance(own_.reduced, after(0));
  const int next = (call_.rank + 1) % call_.num_ranks;
  const int previous = (call_.rank + call_.num_ranks - 1) % call_.num_ranks;
  return ring_through(own_.mailbox, segment_.seat(previous).mailbox, bucket_, call_.scale,
                      call_.rank, call_.num_ranks,
                      [&](Counter& counter, uint32_t target, Neighbour whose) {
                        const int peer = whose == Neighbour::kNext ? next : previous;
                        return wait_for(counter, target, [=] { return std::vector<int>{peer}; });
                      });
}

// Waits until all ranks have sent their elements of `round`, all of the same call.
Status SegmentCall::wait_for_round(uint32_t round) {
  Status status = wait_for_all(&Seat::sent, after(round));
  pause_at(Stage::kReduce);
  if (status.ok()) status = check_signatures(round);
  if (status.ok() && round == 0) count_wait();
  pause_at(Stage::kReduce);
  return status;
}

Status SegmentCall::check_signatures(uint32_t round) {
  const Signature& mine = slot(call_.rank, round).signature;
  for (int rank = 0; rank < call_.num_ranks; ++rank) {
    const Signature& theirs = slot(rank, round).signature;
    if (std::memcmp(&mine, &theirs, sizeof mine) == 0) continue;
    const auto text = [](const Signature& it) {
      return "bucket " + std::to_string(it.bucket) + ", call " + std::to_string(it.nth) +
             ", with " + std::to_string(it.count) + " elements";
    };
    return segment_.stop(invalid(
        call_, nth_,
        "ranks disagree: rank " + std::to_string(call_.rank) + " calls " + text(mine) + ", rank " +
            std::to_string(rank) + " " + text(theirs) +
            " (operation, type, leaf sizes, slices, scale and algorithm must also be equal)"));
  }
  return {};
}

// The rank of this process that entered last counts, once for all of them.
void SegmentCall::count_wait() {
  const int64_t mine = slot(call_.rank, 0).entered_ns;
  int64_t others = mine;
  for (int rank = 0; rank < call_.num_ranks; ++rank) {
    const int64_t theirs = slot(rank, 0).entered_ns;
    if (!segment_.is_local(rank)) {
      others = std::max(others, theirs);
    } else if (theirs > mine || (theirs == mine && rank > call_.rank)) {
      return;
    }
  }
  if (others > mine) add_wait(others - mine);
}

Status SegmentCall::wait_for_all(CounterOf counter, uint32_t target) {
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int rank = 0; rank < call_.num_ranks; ++rank) {
      if (!reached(segment_.seat(rank).*counter, target)) ranks.push_back(rank);
    }
    return ranks;
  };
  for (int rank = 0; rank < call_.num_ranks; ++rank) {
    Counter& theirs = segment_.seat(rank).*counter;
    if (rank == call_.rank || reached(theirs, target)) continue;
    const Status status = wait_for(theirs, target, missing);
    if (!status.ok()) return status;
  }
  return {};
}

Status SegmentCall::wait_for(Counter& counter, uint32_t target,
                             const std::function<std::vector<int>()>& who) {
  const Stopwatch watch;
  while (!wait_briefly(counter, target)) {
    if (segment_.is_stopped()) return segment_.stop_reason();
    if (aborted()) return segment_.stop(was_aborted(call_, nth_, abort_reason()));
    std::vector<int> gone;
    const std::vector<int> missing = who();
    for (int rank : missing) {
      if (segment_.is_gone(rank)) gone.push_back(rank);
    }
    if (!gone.empty() && !reached(counter, target)) {
      return segment_.stop(peer_gone(call_, nth_, gone));
    }
    if (watch.expired() && !missing.empty()) {
      return segment_.stop(timed_out(call_, nth_, watch.elapsed_s(), missing));
    }
  }
  return {};
}

Status SegmentCall::run() {
  switch (call_.operation) {
    case Operation::kReduceScatter:
      return reduce_scatter();
    case Operation::kAllGather:
      return all_gather();
    case Operation::kAllToAll:
      return all_to_all();
    default:
      if (call_.algorithm == Algorithm::kRing) return ring();
      return visit(bucket_.type(), [&](auto zero) { return all_reduce<decltype(zero)>(); });
  }
}

}  // namespace jdp
