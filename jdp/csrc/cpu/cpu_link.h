// A Link between two ranks that share memory: a mailbox with a few slots.

#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <utility>

#include "../common/ring_all_reduce.h"
#include "../common/status.h"
#include "bucket.h"
#include "fuzzing.h"
#include "wait.h"

namespace jdp {

// Messages from one rank to the next. Counters continue from call to call: at its end, all sent
// messages have been received.
struct Mailbox {
  static constexpr int kNumSlots = 2;
  static constexpr int64_t kBytes = kSlotBytes / 2;  // 256 KiB

  Counter sent;      // messages; written by the sender
  Counter received;  // messages; written by the receiver
  alignas(128) std::byte slots[kNumSlots][kBytes];
};

// The error of a wait names the neighbour.
enum class Neighbour { kPrevious, kNext };
using WaitForNeighbour = std::function<Status(Counter&, uint32_t target, Neighbour)>;

// After a failed wait, later calls do nothing, and `status()` returns the error.
template <typename T>
class CpuLink {
  using E = Element<T>;
  using Sum = typename E::Sum;
  using Scale = typename E::Scale;

 public:
  CpuLink(Mailbox& to_next, Mailbox& from_previous, const Bucket& bucket, Scale scale,
          WaitForNeighbour wait)
      : out_(to_next), in_(from_previous), bucket_(bucket), scale_(scale), wait_(std::move(wait)) {}

  int64_t align() const { return 64 / static_cast<int64_t>(sizeof(T)); }
  int64_t capacity() const { return Mailbox::kBytes / static_cast<int64_t>(sizeof(Sum)); }
  const Status& status() const { return status_; }

  void send(Span span) {
    Sum* out = static_cast<Sum*>(free_slot());
    if (!out) return;
    pieces(span, [&](const T* own, T*, int64_t size, int64_t offset) {
      for (int64_t i = 0; i < size; ++i) out[offset + i] = E::widen(own[i]);
    });
    post();
  }

  void recv_reduce_send(Span span) {
    const Sum* in = static_cast<const Sum*>(message());
    Sum* out = static_cast<Sum*>(free_slot());
    if (!in || !out) return;
    pieces(span, [&](const T* own, T*, int64_t size, int64_t offset) {
      for (int64_t i = 0; i < size; ++i) out[offset + i] = in[offset + i] + E::widen(own[i]);
    });
    take();
    post();
  }

  void recv_reduce_copy_send(Span span) {
    const Sum* in = static_cast<const Sum*>(message());
    T* out = static_cast<T*>(free_slot());
    if (!in || !out) return;
    pieces(span, [&](const T* own, T* result, int64_t size, int64_t offset) {
      T* sent = out + offset;
      for (int64_t i = 0; i < size; ++i) {
        sent[i] = E::round(static_cast<Sum>(in[offset + i] + E::widen(own[i])), scale_);
      }
      std::memcpy(result, sent, size * sizeof(T));
    });
    take();
    post();
  }

  void recv_copy_send(Span span) {
    const T* in = static_cast<const T*>(message());
    T* out = static_cast<T*>(free_slot());
    if (!in || !out) return;
    std::memcpy(out, in, span.size * sizeof(T));
    pieces(span, [&](const T*, T* result, int64_t size, int64_t offset) {
      std::memcpy(result, in + offset, size * sizeof(T));
    });
    take();
    post();
  }

  void recv_copy(Span span) {
    const T* in = static_cast<const T*>(message());
    if (!in) return;
    pieces(span, [&](const T*, T* result, int64_t size, int64_t offset) {
      std::memcpy(result, in + offset, size * sizeof(T));
    });
    take();
  }

  void copy_scaled(Span span) {
    pieces(span, [&](const T* own, T* result, int64_t size, int64_t) {
      for (int64_t i = 0; i < size; ++i) result[i] = E::round(E::widen(own[i]), scale_);
    });
  }

 private:
  template <typename Visitor>
  void pieces(Span span, Visitor visitor) {
    bucket_.pieces(span.begin, span.size,
                   [&](size_t index, int64_t first, int64_t size, int64_t offset) {
                     const Leaf& leaf = bucket_.leaf(index);
                     visitor(static_cast<const T*>(leaf.in) + first,
                             static_cast<T*>(leaf.out) + first, size, offset);
                   });
  }

  // Returns null after a failure.
  void* free_slot() {
    const uint32_t sent = out_.sent.value.load(std::memory_order_relaxed);
    return wait(out_.received, sent + 1 - Mailbox::kNumSlots, Neighbour::kNext)
               ? out_.slots[sent % Mailbox::kNumSlots]
               : nullptr;
  }

  const void* message() {
    const uint32_t received = in_.received.value.load(std::memory_order_relaxed);
    return wait(in_.sent, received + 1, Neighbour::kPrevious)
               ? in_.slots[received % Mailbox::kNumSlots]
               : nullptr;
  }

  void post() {
    pause_at(Stage::kMessage);
    advance(out_.sent, out_.sent.value.load(std::memory_order_relaxed) + 1);
  }
  void take() {
    pause_at(Stage::kMessage);
    advance(in_.received, in_.received.value.load(std::memory_order_relaxed) + 1);
  }

  bool wait(Counter& counter, uint32_t target, Neighbour whose) {
    if (status_.ok() && !reached(counter, target)) status_ = wait_(counter, target, whose);
    return status_.ok();
  }

  Mailbox& out_;
  Mailbox& in_;
  const Bucket& bucket_;
  const Scale scale_;
  const WaitForNeighbour wait_;
  Status status_;
};

// Runs this rank's part of a ring.
inline Status ring_through(Mailbox& to_next, Mailbox& from_previous, const Bucket& bucket,
                           double scale, int rank, int num_ranks, const WaitForNeighbour& wait) {
  return visit(bucket.type(), [&](auto zero) {
    using T = decltype(zero);
    CpuLink<T> link(to_next, from_previous, bucket, static_cast<typename Element<T>::Scale>(scale),
                    wait);
    ring_all_reduce(link, bucket.count(), rank, num_ranks);
    return link.status();
  });
}

}  // namespace jdp
