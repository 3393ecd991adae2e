// One rank's call of a collective through a shared-memory segment.

#pragma once

#include "segment.h"

namespace jdp {

// In each round a rank copies its elements into its slot, waits until all ranks have done so, and
// reads all slots. Rounds overlap: a rank copies the elements of the next round before it waits for
// this one. See segment_call.cc for the all-reduce, segment_shards.cc for the other operations.
class SegmentCall {
 public:
  // `nth` counts the calls of this bucket from 1.
  SegmentCall(const Call& call, const Bucket& bucket, uint64_t nth, Segment& segment)
      : call_(call),
        bucket_(bucket),
        nth_(nth),
        segment_(segment),
        own_(segment.seat(call.rank)),
        base_(own_.num_rounds) {}

  // Runs `call.operation`.
  Status run();

 private:
  using CounterOf = Counter Seat::*;

  // All-reduce, direct.
  template <typename T>
  Status all_reduce();
  template <typename T>
  void publish(uint32_t round, Span span);
  template <typename T>
  Status reduce_chunk(uint32_t round, Span span);
  template <typename T>
  Status gather(uint32_t round, Span span);
  template <typename T>
  Span chunk(int rank, Span span) const;

  Status ring();

  // A Span counts elements of one rank's slices, concatenated.
  Status reduce_scatter();
  template <typename T>
  Status reduce_scatter();
  template <typename T>
  void publish_wholes(uint32_t round, Span span, int64_t width);
  template <typename T>
  void reduce_slices(uint32_t round, Span span, int64_t width);
  Status all_gather();
  void publish_slices(uint32_t round, Span span);
  void gather_wholes(uint32_t round, Span span);
  Status all_to_all();
  void read_slices(uint32_t round, Span span, int64_t width);
  void keep_slice(const Leaf& leaf, int64_t begin, int64_t size);
  template <typename Publish, typename Read>
  Status in_chunks(int64_t element_bytes, Publish publish, Read read);
  template <typename Publish, typename Read>
  Status in_rounds(int64_t width, Publish publish, Read read);

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
  Status wait_for_round(uint32_t round);
  Status check_signatures(uint32_t round);
  void count_wait();
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

}  // namespace jdp
