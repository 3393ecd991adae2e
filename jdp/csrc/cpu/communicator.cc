#include "communicator.h"

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "reduce.h"

namespace jdp {
namespace {

// Up to this size, reading all data from all ranks is faster than waiting twice.
constexpr int64_t kOneShotBytes = kSlotBytes / 16;  // 32 KiB

// State of one of this process's ranks.
struct LocalRank {
  std::mutex busy;                        // one call at a time
  std::map<int32_t, uint64_t> num_calls;  // by bucket
};

struct Communicator {
  std::shared_ptr<Segment> first;  // holds the address of its latest successor
  std::shared_ptr<Segment> segment;
  std::map<int, LocalRank> ranks;
};

// One rank's call.
class SegmentCall {
 public:
  SegmentCall(const Call& call, const Bucket& bucket, uint64_t nth, Segment& segment)
      : call_(call),
        bucket_(bucket),
        nth_(nth),
        segment_(segment),
        own_(segment.seat(call.rank)),
        base_(own_.num_rounds) {}

  template <typename T>
  Status direct();
  Status ring();

 private:
  using CounterOf = Counter Seat::*;

  template <typename T>
  void publish(uint32_t round, Span span);
  template <typename T>
  Status reduce_chunk(uint32_t round, Span span);
  template <typename T>
  Status gather(uint32_t round, Span span);
  template <typename T>
  Span chunk(int rank, Span span) const;

  Slot& slot(int rank, uint32_t round) {
    return segment_.seat(rank).slots[(base_ + round) % Seat::kNumSlots];
  }
  template <typename T>
  T* data(int rank, uint32_t round) {
    return reinterpret_cast<T*>(slot(rank, round).data);
  }
  template <typename T>
  T* result(int rank, uint32_t round) {
    return reinterpret_cast<T*>(slot(rank, round).result);
  }
  // The value of a counter once `round` is done.
  uint32_t after(uint32_t round) const { return static_cast<uint32_t>(base_ + round + 1); }

  void sign(uint32_t round);
  void advance_sent(uint32_t round);
  Status check_signatures(uint32_t round);
  Status wait_for_all(CounterOf counter, uint32_t target);
  Status wait_for(Counter& counter, uint32_t target, const std::function<std::vector<int>()>& who);

  const Call& call_;
  const Bucket& bucket_;
  const uint64_t nth_;
  Segment& segment_;
  Seat& own_;
  const uint64_t base_;  // rounds before this call
  bool one_shot_ = false;
};

template <typename T>
Status SegmentCall::direct() {
  constexpr int64_t kSize = sizeof(T);
  one_shot_ = bucket_.count() * kSize <= kOneShotBytes;
  const int64_t width = Slot::kBytes / kSize;
  // An empty bucket takes one round, in which the ranks compare their signatures.
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

// Why a rank may write into a slot without waiting, though it was last used three rounds ago, in
// round r:
//
// `signature` and `data` are written when round r + 3 begins, and read by all ranks when they
// reduce round r. If round r has a gather stage, this rank has completed it, and saw then that all
// ranks have reduced r. Otherwise r is the only round of its call (one-shot, or a ring), and r + 1
// is the first round of the next call. A rank sends at most two rounds of a call, here r + 1 and r
// + 2, before it sees that all ranks have sent the first, and so have left the previous call.
//
// `result` is written by reduce_chunk of round r + 3, after all ranks have sent r + 3, and read by
// the others when they gather r. A rank that has sent r + 3 has gathered r: in the previous
// iteration if both rounds belong to one call, else before it left the call of r.
void SegmentCall::sign(uint32_t round) {
  slot(call_.rank, round).signature = {bucket_.fingerprint(), bucket_.count(), nth_,
                                       call_.scale,           call_.bucket,    call_.algorithm};
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
  Status status = wait_for_all(&Seat::sent, after(round));
  pause_at(Stage::kReduce);
  if (status.ok()) status = check_signatures(round);
  if (!status.ok()) return status;
  pause_at(Stage::kReduce);
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
  Status status = wait_for_all(&Seat::sent, after(0));
  pause_at(Stage::kReduce);
  if (status.ok()) status = check_signatures(0);
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

Status SegmentCall::check_signatures(uint32_t round) {
  const Signature& mine = slot(call_.rank, round).signature;
  for (int rank = 0; rank < call_.num_ranks; ++rank) {
    const Signature& theirs = slot(rank, round).signature;
    if (std::memcmp(&mine, &theirs, sizeof mine) == 0) continue;
    const auto text = [](const Signature& it) {
      return "bucket " + std::to_string(it.bucket) + ", call " + std::to_string(it.nth) +
             ", with " + std::to_string(it.count) + " elements";
    };
    return segment_.stop(
        invalid(call_, nth_,
                "ranks disagree: rank " + std::to_string(call_.rank) + " reduces " + text(mine) +
                    ", rank " + std::to_string(rank) + " " + text(theirs) +
                    " (type, leaf sizes, scale and algorithm must also be equal)"));
  }
  return {};
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

std::shared_ptr<Communicator> communicator_in(std::shared_ptr<Segment> first,
                                              std::shared_ptr<Segment> segment) {
  auto made = std::make_shared<Communicator>();
  for (int rank = 0; rank < segment->num_ranks(); ++rank) {
    if (segment->is_local(rank)) made->ranks[rank];
  }
  made->first = std::move(first);
  made->segment = std::move(segment);
  return made;
}

// Guards the table only, not the communicators in it.
std::mutex& table_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}

std::map<std::pair<int64_t, int32_t>, std::shared_ptr<Communicator>>& table() {
  static auto* only = new std::map<std::pair<int64_t, int32_t>, std::shared_ptr<Communicator>>;
  return *only;
}

}  // namespace

Status all_reduce_in_segment(const Call& call, const Bucket& bucket) {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard<std::mutex> lock(table_mutex());
    const auto found = table().find({call.communicator, call.group});
    if (found != table().end()) communicator = found->second;
  }
  if (!communicator || !communicator->ranks.count(call.rank) ||
      communicator->segment->num_ranks() != call.num_ranks) {
    return invalid(call, 0,
                   "this process has not attached rank " + std::to_string(call.rank) + " of " +
                       std::to_string(call.num_ranks) + " to communicator " +
                       std::to_string(call.communicator) + ", group " + std::to_string(call.group));
  }
  Segment& segment = *communicator->segment;
  LocalRank& local = communicator->ranks[call.rank];
  const std::lock_guard<std::mutex> lock(local.busy);
  if (segment.is_stopped()) return segment.stop_reason();
  SegmentCall segment_call(call, bucket, ++local.num_calls[call.bucket], segment);
  if (call.algorithm == Algorithm::kRing) return segment_call.ring();
  return visit(bucket.type(), [&](auto zero) { return segment_call.direct<decltype(zero)>(); });
}

void attach_communicator(int64_t communicator, int32_t group, std::shared_ptr<Segment> segment) {
  auto made = communicator_in(segment, segment);
  const std::lock_guard<std::mutex> lock(table_mutex());
  table()[{communicator, group}] = std::move(made);
}

bool renew_communicators(std::string* why) {
  const std::lock_guard<std::mutex> lock(table_mutex());
  bool is_done = true;
  for (auto entry = table().begin(); entry != table().end();) {
    const Communicator& before = *entry->second;
    auto segment = Segment::renew(*before.first, *before.segment, why);
    is_done = is_done && segment;
    if (segment) {
      entry->second = communicator_in(before.first, std::move(segment));
      ++entry;
    } else {
      entry = table().erase(entry);
    }
  }
  return is_done;
}

void stop_communicators(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(table_mutex());
  for (const auto& entry : table()) entry.second->segment->stop({Code::kAborted, "jdp: " + reason});
}

void detach_communicators() {
  const std::lock_guard<std::mutex> lock(table_mutex());
  table().clear();
}

}  // namespace jdp
