// The Link of ring_all_reduce.h between two GPUs: one thread block sends and receives one channel.
//
// A message is in one of kNumSlots slots in the next rank's memory. The sender announces it in the
// next rank's `head`. The receiver frees the slot in the sender's `credit`.

#pragma once

#include <cstdint>

#include "channel.cuh"

namespace jdp {

// Spans count units of 16 bytes, from the start of the channel's part.
template <typename T, typename Block>
class CudaLink {
 public:
  JDP_DEVICE explicit CudaLink(Channel<T, Block>& channel)
      : channel_(channel),
        layout_(channel.arguments.layout),
        previous_((channel.arguments.rank + layout_.num_ranks - 1) % layout_.num_ranks),
        next_((channel.arguments.rank + 1) % layout_.num_ranks) {}

  JDP_DEVICE int64_t capacity() const { return layout_.slot_bytes / sizeof(SumVector<T>); }
  JDP_DEVICE static int64_t align() { return 1; }

  JDP_DEVICE void send(Span span) {
    if (!wait(false, true)) return;
    Message out = sending(span);
    each(
        span, [&](const Segment& segment, int32_t v, auto whole) { return own(segment, v, whole); },
        [&](const Segment&, int32_t v, auto, const Elements& loaded) {
          out.store(v, widen<T>(loaded));
        });
    advance(false, true);
  }

  JDP_DEVICE void recv_reduce_send(Span span) {
    if (!wait(true, true)) return;
    const Message in = receiving(span);
    Message out = sending(span);
    each(
        span,
        [&](const Segment& segment, int32_t v, auto whole) {
          return Both{own(segment, v, whole), in.template load<Sums>(v)};
        },
        [&](const Segment&, int32_t v, auto, const Both& loaded) {
          out.store(v, add<T>(loaded.sums, loaded.own));
        });
    advance(true, true);
  }

  JDP_DEVICE void recv_reduce_copy_send(Span span) {
    if (!wait(true, true)) return;
    const Message in = receiving(span);
    Message out = sending(span);
    each(
        span,
        [&](const Segment& segment, int32_t v, auto whole) {
          return Both{own(segment, v, whole), in.template load<Sums>(v)};
        },
        [&](const Segment& segment, int32_t v, auto whole, const Both& loaded) {
          const Elements mean = round<T>(add<T>(loaded.sums, loaded.own), channel_.scale);
          store_own<T>(segment, v, mean, whole);
          out.store(v, mean);
        });
    advance(true, true);
  }

  JDP_DEVICE void recv_copy_send(Span span) {
    if (!wait(true, true)) return;
    const Message in = receiving(span);
    Message out = sending(span);
    each(
        span, [&](const Segment&, int32_t v, auto) { return in.template load<Elements>(v); },
        [&](const Segment& segment, int32_t v, auto whole, const Elements& loaded) {
          store_own<T>(segment, v, loaded, whole);
          out.store(v, loaded);
        });
    advance(true, true);
  }

  JDP_DEVICE void recv_copy(Span span) {
    if (!wait(true, false)) return;
    const Message in = receiving(span);
    each(
        span, [&](const Segment&, int32_t v, auto) { return in.template load<Elements>(v); },
        [&](const Segment& segment, int32_t v, auto whole, const Elements& loaded) {
          store_own<T>(segment, v, loaded, whole);
        });
    advance(true, false);
  }

  JDP_DEVICE void copy_scaled(Span span) {
    each(
        span, [&](const Segment& segment, int32_t v, auto whole) { return own(segment, v, whole); },
        [&](const Segment& segment, int32_t v, auto whole, const Elements& loaded) {
          store_own<T>(segment, v, round<T>(widen<T>(loaded), channel_.scale), whole);
        });
  }

 private:
  using Elements = Vector<T>;
  using Sums = SumVector<T>;

  struct Both {
    Elements own;
    Sums sums;
  };

  // A message, indexed by a unit's number in the whole vector.
  struct Message {
    char* slot;
    int32_t first;

    template <typename V>
    JDP_DEVICE V load(int32_t vector) const {
      return load_vector<V>(slot + int64_t{vector - first} * sizeof(V));
    }
    template <typename V>
    JDP_DEVICE void store(int32_t vector, const V& value) {
      store_vector(slot + int64_t{vector - first} * sizeof(V), value);
    }
  };

  template <typename Whole>
  JDP_DEVICE static Elements own(const Segment& segment, int32_t vector, Whole whole) {
    return load_own<T>(segment, vector, whole);
  }

  template <typename Load, typename Store>
  JDP_DEVICE void each(Span span, Load load, Store store) {
    span.begin += channel_.span.begin;
    for_each_vector<T>(channel_.block, channel_.arguments, span, load, store);
  }

  JDP_DEVICE Message receiving(Span span) const {
    char* slot = channel_.own()->slot(layout_, channel_.index, channel_.state.received);
    return {slot, static_cast<int32_t>(channel_.span.begin + span.begin)};
  }

  JDP_DEVICE Message sending(Span span) const {
    const Staging& target = channel_.arguments.staging[next_];
    char* slot = target.slot(layout_, channel_.index, channel_.state.sent);
    return {slot, static_cast<int32_t>(channel_.span.begin + span.begin)};
  }

  // Waits for a message to receive, for a free slot to send, or for both.
  JDP_DEVICE bool wait(bool receive, bool send) {
    const ChannelFlags* flags = channel_.own()->channel(channel_.index);
    const ChannelState& state = channel_.state;
    const auto missing = [&](int) {
      const uint32_t head = channel_.block.load_acquire(&flags->head);
      const uint32_t credit = channel_.block.load_acquire(&flags->credit);
      if (receive && !reached(head, state.received + 1)) return previous_;
      if (send && !reached(credit, state.sent + 1 - kNumSlots)) return next_;
      return -1;
    };
    const auto received = [&](int) -> typename Channel<T, Block>::From {
      return {previous_, receive ? &flags->tags[state.received % kNumSlots] : nullptr};
    };
    return channel_.wait(1, missing, received);
  }

  // The barrier: a message is complete before it is announced, and read before its slot is freed.
  JDP_DEVICE void advance(bool receive, bool send) {
    channel_.block.sync();
    channel_.state.sent += send;
    channel_.state.received += receive;
    if (channel_.block.thread() != 0) return;
    const Staging* staging = channel_.arguments.staging;
    if (send) {
      ChannelFlags* flags = staging[next_].channel(channel_.index);
      flags->tags[(channel_.state.sent - 1) % kNumSlots] = channel_.tag();
      channel_.block.store_release(&flags->head, channel_.state.sent);
    }
    if (receive) {
      uint32_t* credit = &staging[previous_].channel(channel_.index)->credit;
      channel_.block.store_release(credit, channel_.state.received);
    }
  }

  Channel<T, Block>& channel_;
  const Layout& layout_;
  const int previous_;
  const int next_;
};

}  // namespace jdp
