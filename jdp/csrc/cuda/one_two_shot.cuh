// One-shot and two-shot all-reduce: every rank writes directly to every other one. Sums are in rank
// order, so a result does not depend on an element's position in the bucket.
//
// An exchange: each rank writes one slot of each peer, then waits for all of its own slots. Two
// sets of slots need no credit: a rank that sends exchange i + 2 has received i + 1 from every
// peer, which sent it after reading exchange i.

#pragma once

#include <cstdint>

#include "channel.cuh"

namespace jdp {

template <typename T, typename Block>
class Exchange {
 public:
  JDP_DEVICE explicit Exchange(Channel<T, Block>& channel)
      : channel_(channel),
        layout_(channel.arguments.layout),
        rank_(channel.arguments.rank),
        num_ranks_(channel.arguments.layout.num_ranks) {}

  // Each rank sends (n - 1) S bytes, and sums the whole bucket.
  JDP_DEVICE void one_shot() {
    if (channel_.failed()) return;
    const int64_t count = channel_.span.size;
    for (int64_t begin = 0; begin < count; begin += capacity()) {
      const Span span = shifted(begin, count - begin < capacity() ? count - begin : capacity());
      for_each_vector<T>(
          channel_.block, channel_.arguments, span,
          [&](const Segment& segment, int32_t v, auto whole) {
            return load_own<T>(segment, v, whole);
          },
          [&](const Segment&, int32_t v, auto, const Vector<T>& own) {
            send_to_all(v - span.begin, own);
          });
      if (!pass()) return;
      reduce_copy(span, [](int32_t, const Vector<T>&) {});
    }
  }

  // Two exchanges; each rank sends 2 (n - 1) / n S bytes, as in a ring.
  JDP_DEVICE void two_shot() {
    if (channel_.failed()) return;
    const int64_t count = channel_.span.size;
    const int64_t round = capacity() * num_ranks_;
    for (int64_t begin = 0; begin < count; begin += round) {
      const int64_t size = count - begin < round ? count - begin : round;
      const auto chunk = [&](int rank) {
        const Span span = chunk_span(rank, num_ranks_, begin, size, 1);
        return shifted(span.begin, span.size);
      };
      push(chunk);
      if (!pass()) return;
      const Span own = chunk(rank_);
      reduce_copy(own, [&](int32_t v, const Vector<T>& mean) { send_to_all(v - own.begin, mean); });
      if (!pass()) return;
      recv_copy(chunk);
    }
  }

 private:
  static constexpr int kParts = 8;

  JDP_DEVICE int64_t capacity() const { return layout_.exchange_bytes / kVectorBytes; }

  JDP_DEVICE Span shifted(int64_t begin, int64_t size) const {
    return {channel_.span.begin + begin, size};
  }

  // The slot of `peer` that this rank writes in the next exchange.
  JDP_DEVICE char* sent(int peer) const {
    return channel_.arguments.staging[peer].exchange_slot(layout_, channel_.index,
                                                          channel_.state.exchanged, rank_);
  }

  // The slot that `peer` wrote in the last exchange.
  JDP_DEVICE const char* received(int peer) const {
    return channel_.own()->exchange_slot(layout_, channel_.index, channel_.state.exchanged - 1,
                                         peer);
  }

  // Not all ranks write to the same peer at once.
  JDP_DEVICE int peer_at(int step) const {
    const int peer = rank_ + step;
    return peer < num_ranks_ ? peer : peer - num_ranks_;
  }

  JDP_DEVICE void send_to_all(int64_t vector, const Vector<T>& value) const {
    for (int step = 1; step < num_ranks_; ++step) {
      store_vector(sent(peer_at(step)) + vector * kVectorBytes, value);
    }
  }

  template <typename Chunk>
  JDP_DEVICE void push(Chunk chunk) {
    for (int step = 1; step < num_ranks_; ++step) {
      const int peer = peer_at(step);
      const Span span = chunk(peer);
      char* slot = sent(peer);
      for_each_vector<T>(
          channel_.block, channel_.arguments, span,
          [&](const Segment& segment, int32_t v, auto whole) {
            return load_own<T>(segment, v, whole);
          },
          [&](const Segment&, int32_t v, auto, const Vector<T>& own) {
            store_vector(slot + (v - span.begin) * kVectorBytes, own);
          });
    }
  }

  // Announces this rank's slots, and waits for those of every peer.
  JDP_DEVICE bool pass() {
    const Block& block = channel_.block;
    const uint32_t set = channel_.state.exchanged % kNumSets;
    const uint32_t number = ++channel_.state.exchanged;
    block.sync();
    for (int peer = block.thread(); peer < num_ranks_; peer += block.num_threads()) {
      ChannelFlags* flags = channel_.arguments.staging[peer].channel(channel_.index);
      if (peer == rank_) continue;
      flags->exchange_tags[set][rank_] = channel_.tag();
      block.store_release(&flags->exchanged[rank_], number);
    }
    const ChannelFlags* flags = channel_.own()->channel(channel_.index);
    const auto missing = [&](int peer) {
      const uint32_t got = peer == rank_ ? number : block.load_acquire(&flags->exchanged[peer]);
      return reached(got, number) ? -1 : peer;
    };
    const auto received = [&](int peer) -> typename Channel<T, Block>::From {
      return {peer, peer == rank_ ? nullptr : &flags->exchange_tags[set][peer]};
    };
    return channel_.wait(num_ranks_, missing, received);
  }

  // Sums `span` over ranks, scales, rounds, copies it to the output, and passes it to `also(vector,
  // mean)`.
  template <typename Also>
  JDP_DEVICE void reduce_copy(Span span, Also also) {
    const auto sum = [&](const Segment& segment, int32_t v, auto whole) {
      SumVector<T> sums;
      for (int first = 0; first < num_ranks_; first += kParts) {
        // Issue all loads before the first addition.
        Vector<T> parts[kParts];
        JDP_UNROLL
        for (int i = 0; i < kParts; ++i) {
          const int rank = first + i;
          if (rank == rank_) {
            parts[i] = load_own<T>(segment, v, whole);
          } else if (rank < num_ranks_) {
            parts[i] = load_vector<Vector<T>>(received(rank) + (v - span.begin) * kVectorBytes);
          }
        }
        JDP_UNROLL
        for (int i = 0; i < kParts; ++i) {
          if (first + i == 0) {
            sums = widen<T>(parts[i]);
          } else if (first + i < num_ranks_) {
            sums = add<T>(sums, parts[i]);
          }
        }
      }
      return sums;
    };
    for_each_vector<T, 1>(
        channel_.block, channel_.arguments, span, sum,
        [&](const Segment& segment, int32_t v, auto whole, const SumVector<T>& sums) {
          const Vector<T> mean = round<T>(sums, channel_.scale);
          store_own<T>(segment, v, mean, whole);
          also(v, mean);
        });
  }

  template <typename Chunk>
  JDP_DEVICE void recv_copy(Chunk chunk) {
    for (int step = 1; step < num_ranks_; ++step) {
      const int peer = peer_at(step);
      const Span span = chunk(peer);
      const char* slot = received(peer);
      for_each_vector<T>(
          channel_.block, channel_.arguments, span,
          [&](const Segment&, int32_t v, auto) {
            return load_vector<Vector<T>>(slot + (v - span.begin) * kVectorBytes);
          },
          [&](const Segment& segment, int32_t v, auto whole, const Vector<T>& mean) {
            store_own<T>(segment, v, mean, whole);
          });
    }
  }

  Channel<T, Block>& channel_;
  const Layout& layout_;
  const int rank_;
  const int num_ranks_;
};

}  // namespace jdp
