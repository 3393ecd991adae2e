// What the blocks of all algorithms share: this channel's part of the vector, waits for peers, and
// the end of a failed call.

#pragma once

#include <cstdint>

#include "arguments.h"
#include "vectors.cuh"

namespace jdp {

// Whether a counter that wraps around has reached `target`.
JDP_DEVICE bool reached(uint32_t counter, uint32_t target) {
  return static_cast<int32_t>(counter - target) >= 0;
}

// All threads of the block call every member, unless its comment says one thread.
template <typename T, typename Block>
class Channel {
 public:
  using Scale = typename Element<T>::Scale;

  JDP_DEVICE Channel(const Arguments& arguments, int index, Block block)
      : arguments(arguments),
        block(block),
        index(index),
        state(own()->channel(index)->state),
        scale(*static_cast<const Scale*>(arguments.scale)),
        span(chunk_span(index, arguments.num_channels, 0, arguments.num_vectors, 1)) {
    // A rank that has received an abort does not start. (The host's own abort flag takes a
    // microsecond to read, and the host does not launch after it.)
    const bool is_aborted = block.thread() == 0 && block.load_acquire(&own()->rank()->abort);
    failed_ = block.any(is_aborted);
    if (is_aborted) aborted();
  }

  // The first `num_askers` threads each poll `missing(asker)` until it returns -1 instead of a
  // rank. Then each checks `received(asker)`: the rank that sent a message, and its tag or nullptr.
  // Returns false if a rank stayed missing, a message belongs to another bucket or call, or there
  // is an abort. From then on do not send or read.
  template <typename Missing, typename Received>
  JDP_DEVICE bool wait(int num_askers, Missing missing, Received received) {
    if (failed_) return false;
    bool gave_up = false;
    for (int asker = block.thread(); asker < num_askers; asker += block.num_threads()) {
      gave_up = gave_up || !poll([&] { return missing(asker); }) || !belongs(received(asker));
    }
    failed_ = block.any(gave_up);
    ++step_;
    return !failed_;
  }

  // Call it last. After a failure the output is filled with ones, which is NaN in every
  // floating-point type.
  JDP_DEVICE void end_call() {
    if (failed_) {
      Vector<T> ones;
      memset(&ones, 0xff, sizeof ones);
      for_each_vector<T>(
          block, arguments, span, [&](const Segment&, int32_t, auto) { return ones; },
          [&](const Segment& segment, int32_t vector, auto whole, const Vector<T>& loaded) {
            store_own<T>(segment, vector, loaded, whole);
          });
    }
    // All threads have read the state: the constructor has a barrier.
    if (block.thread() == 0) {
      ++state.call;
      own()->channel(index)->state = state;
    }
  }

  JDP_DEVICE bool failed() const { return failed_; }

  struct From {
    int rank;
    const Tag* tag;
  };

  JDP_DEVICE Tag tag() const { return {arguments.bucket, state.call, arguments.num_vectors}; }

  JDP_DEVICE const Staging* own() const { return &arguments.staging[arguments.rank]; }

  const Arguments& arguments;
  const Block block;
  const int index;
  ChannelState state;
  const Scale scale;
  const Span span;  // this channel's part, in units of 16 bytes

 private:
  // By one thread. The clock and the abort flags are slow to read: one poll in 64 reads them.
  template <typename Missing>
  JDP_DEVICE bool poll(Missing missing) {
    uint64_t begin_ns = 0;
    for (uint32_t polls = 1;; ++polls) {
      const int peer = missing();
      if (peer < 0) return true;
      block.pause();
      if (polls % 64) continue;
      if (aborted()) return false;
      if (begin_ns == 0) begin_ns = block.now_ns();
      if (arguments.timeout_ns && block.now_ns() - begin_ns > arguments.timeout_ns) {
        give_up(Outcome::kLate, abort_word(arguments.rank, peer, Outcome::kLate), Tag());
        return false;
      }
    }
  }

  // By the thread that saw the message announced.
  JDP_DEVICE bool belongs(From from) {
    if (!from.tag || *from.tag == tag()) return true;
    give_up(Outcome::kMismatched, abort_word(arguments.rank, from.rank, Outcome::kMismatched),
            *from.tag);
    return false;
  }

  // By one thread.
  JDP_DEVICE bool aborted() {
    const uint32_t by_rank = block.load_acquire(&own()->rank()->abort);
    const uint32_t by_host = block.load_acquire(&arguments.report->abort);
    if (!by_rank && !by_host) return false;
    const uint32_t by_this_host = abort_word(-1, -1, Outcome::kAborted);
    give_up(Outcome::kAborted, by_rank ? by_rank : by_this_host, Tag());
    return true;
  }

  // By one thread. Reports the first failure of a rank only, and stops its peers.
  JDP_DEVICE void give_up(Outcome outcome, uint32_t word, Tag sent) {
    if (block.exchange(&own()->rank()->reported, 1)) return;
    const bool by_this_host = aborting_rank(word) < 0;
    JDP_NO_UNROLL
    for (int rank = 0; rank < arguments.layout.num_ranks; ++rank) {
      block.store_release(&arguments.staging[rank].rank()->abort,
                          by_this_host ? abort_word(arguments.rank, -1, Outcome::kAborted) : word);
    }
    Report* report = arguments.report;
    report->call = state.call;
    report->bucket = arguments.bucket;
    report->rank = arguments.rank;
    report->gave_up = aborting_rank(word);
    report->peer = awaited_rank(word);
    report->step = step_;
    report->why = abort_outcome(word);
    report->num_vectors = arguments.num_vectors;
    report->sent = sent;
    block.store_release(&report->outcome, static_cast<uint32_t>(outcome));
  }

  bool failed_;
  int32_t step_ = 0;
};

}  // namespace jdp
