// Reduce-scatter, all-gather and all-to-all through a segment.
//
// A rank writes the elements that others read into its slots: n - 1 slices of S / n bytes in a
// reduce-scatter or an all-to-all, one slice in an all-gather. It reads n - 1 slices from the
// others' slots. An all-reduce copies as much in each of its halves. A leaf of a reduce-scatter
// that stays whole is written once, into this rank's chunk, and read by all.

#include <algorithm>
#include <cstring>

#include "reduce.h"
#include "segment_call.h"

namespace jdp {

// Calls publish(round, span) and read(round, span) for each `width` elements of a rank's slices.
//
// The slot of round r is written again in round r + 3, so all ranks must have read r by then. A
// rank waits for this after it has read r + 1, when most ranks have read r. For the last round see
// `sign`.
template <typename Publish, typename Read>
Status SegmentCall::in_rounds(int64_t width, Publish publish, Read read) {
  const int64_t count = bucket_.slice_count(call_.num_ranks);
  // An empty bucket takes one round, which compares the signatures.
  const int64_t num_rounds = std::max<int64_t>(1, (count + width - 1) / width);
  const auto span = [&](int64_t round) {
    return Span{round * width, std::min(width, count - round * width)};
  };
  for (int64_t i = 0; i <= num_rounds; ++i) {
    if (i < num_rounds) {
      sign(i);
      publish(i, span(i));
      pause_at(Stage::kPublish);
      advance_sent(i);
    }
    if (i >= 1) {
      JDP_RETURN_IF_ERROR(wait_for_round(i - 1));
      read(i - 1, span(i - 1));
      pause_at(Stage::kReduce);
      advance(own_.reduced, after(i - 1));
    }
    if (i >= 2) JDP_RETURN_IF_ERROR(wait_for_all(&Seat::reduced, after(i - 2)));
    pause_at(Stage::kGather);
  }
  return {};
}

Status SegmentCall::reduce_scatter() {
  return visit(bucket_.type(), [&](auto zero) { return reduce_scatter<decltype(zero)>(); });
}

// Calls publish(round, span, width) and read(round, span, width) for rounds in which a slot holds a
// chunk of `width` elements for each rank: this rank's elements of that rank's slices.
template <typename Publish, typename Read>
Status SegmentCall::in_chunks(int64_t element_bytes, Publish publish, Read read) {
  const int64_t width = Slot::kBytes / 64 / call_.num_ranks * (64 / element_bytes);
  if (width == 0) {
    return invalid(call_, nth_, "at most " + std::to_string(Slot::kBytes / 64) + " ranks");
  }
  return in_rounds(
      width, [&](uint32_t round, Span span) { publish(round, span, width); },
      [&](uint32_t round, Span span) { read(round, span, width); });
}

template <typename T>
Status SegmentCall::reduce_scatter() {
  return in_chunks(
      sizeof(T),
      [&](uint32_t round, Span span, int64_t width) { publish_wholes<T>(round, span, width); },
      [&](uint32_t round, Span span, int64_t width) { reduce_slices<T>(round, span, width); });
}

template <typename T>
void SegmentCall::publish_wholes(uint32_t round, Span span, int64_t width) {
  T* const to = data<T>(call_.rank, round);
  const auto copy = [&](size_t index, int64_t first, int64_t size, int64_t at) {
    const Leaf& leaf = bucket_.leaf(index);
    if (leaf.run == 0) {  // the same for all ranks
      std::memcpy(to + call_.rank * width + at, static_cast<const T*>(leaf.in) + first,
                  size * sizeof(T));
      return;
    }
    // It reads its own elements in place; to add them up, only if they are in one run.
    const bool is_kept =
        call_.operation == Operation::kAllToAll || leaf.run * call_.num_ranks == leaf.count;
    runs_of_slice(
        leaf.run, first, size, [&](int64_t row, int64_t begin, int64_t done, int64_t length) {
          const T* from = static_cast<const T*>(leaf.in) + row * call_.num_ranks * leaf.run + begin;
          for (int rank = 0; rank < call_.num_ranks; ++rank, from += leaf.run) {
            if (rank == call_.rank && is_kept) continue;
            std::memcpy(to + rank * width + at + done, from, length * sizeof(T));
          }
        });
  };
  bucket_.slice_pieces(call_.num_ranks, span.begin, span.size, copy);
}

template <typename T>
void SegmentCall::reduce_slices(uint32_t round, Span span, int64_t width) {
  std::vector<const T*> inputs(call_.num_ranks);
  const auto sum = [&](size_t index, int64_t first, int64_t size, int64_t at) {
    const Leaf& leaf = bucket_.leaf(index);
    for (int rank = 0; rank < call_.num_ranks; ++rank) {
      const int chunk = leaf.run == 0 ? rank : call_.rank;
      inputs[rank] = data<T>(rank, round) + chunk * width + at;
    }
    if (leaf.run * call_.num_ranks == leaf.count) {
      inputs[call_.rank] = static_cast<const T*>(leaf.in) + call_.rank * leaf.run + first;
    }
    T* const output = static_cast<T*>(leaf.out) + first;
    reduce<T>(inputs.data(), call_.num_ranks, &output, 1, size,
              static_cast<typename Element<T>::Scale>(call_.scale));
  };
  bucket_.slice_pieces(call_.num_ranks, span.begin, span.size, sum);
}

// An element is a byte.
Status SegmentCall::all_gather() {
  return in_rounds(
      Slot::kBytes, [&](uint32_t round, Span span) { publish_slices(round, span); },
      [&](uint32_t round, Span span) { gather_wholes(round, span); });
}

void SegmentCall::publish_slices(uint32_t round, Span span) {
  const auto copy = [&](size_t index, int64_t first, int64_t size, int64_t at) {
    const Leaf& leaf = bucket_.leaf(index);
    const auto* const in = static_cast<const std::byte*>(leaf.in);
    std::byte* const to = data<std::byte>(call_.rank, round) + at;
    if (leaf.is_in_place()) {
      copy_from_slice(in, leaf.run, call_.rank, call_.num_ranks, first, size, to);
    } else {
      std::memcpy(to, in + first, size);
    }
  };
  bucket_.slice_pieces(call_.num_ranks, span.begin, span.size, copy);
}

void SegmentCall::gather_wholes(uint32_t round, Span span) {
  const auto copy = [&](size_t index, int64_t first, int64_t size, int64_t at) {
    const Leaf& leaf = bucket_.leaf(index);
    runs_of_slice(
        leaf.run, first, size, [&](int64_t row, int64_t begin, int64_t done, int64_t length) {
          std::byte* to =
              static_cast<std::byte*>(leaf.out) + row * call_.num_ranks * leaf.run + begin;
          for (int rank = 0; rank < call_.num_ranks; ++rank, to += leaf.run) {
            if (rank == call_.rank && leaf.is_in_place()) continue;
            const std::byte* from = rank == call_.rank
                                        ? static_cast<const std::byte*>(leaf.in) + first
                                        : data<std::byte>(rank, round) + at;
            std::memcpy(to, from + done, length);
          }
        });
  };
  bucket_.slice_pieces(call_.num_ranks, span.begin, span.size, copy);
}

// An element is a byte.
Status SegmentCall::all_to_all() {
  return in_chunks(
      1,
      [&](uint32_t round, Span span, int64_t width) {
        publish_wholes<std::byte>(round, span, width);
      },
      [&](uint32_t round, Span span, int64_t width) { read_slices(round, span, width); });
}

void SegmentCall::read_slices(uint32_t round, Span span, int64_t width) {
  const auto copy = [&](size_t index, int64_t first, int64_t size, int64_t at) {
    const Leaf& leaf = bucket_.leaf(index);
    keep_slice(leaf, first, size);
    runs_of_slice(
        leaf.out_run, first, size, [&](int64_t row, int64_t begin, int64_t done, int64_t length) {
          std::byte* to =
              static_cast<std::byte*>(leaf.out) + row * call_.num_ranks * leaf.out_run + begin;
          for (int rank = 0; rank < call_.num_ranks; ++rank, to += leaf.out_run) {
            if (rank == call_.rank) continue;
            std::memcpy(to, data<std::byte>(rank, round) + call_.rank * width + at + done, length);
          }
        });
  };
  bucket_.slice_pieces(call_.num_ranks, span.begin, span.size, copy);
}

// Copies elements [begin, begin + size) of the slice that this rank sends to itself.
void SegmentCall::keep_slice(const Leaf& leaf, int64_t begin, int64_t size) {
  const int rank = call_.rank;
  runs_of_slice(leaf.out_run, begin, size,
                [&](int64_t row, int64_t first, int64_t done, int64_t length) {
                  copy_from_slice(static_cast<const std::byte*>(leaf.in), leaf.run, rank,
                                  call_.num_ranks, begin + done, length,
                                  static_cast<std::byte*>(leaf.out) +
                                      (row * call_.num_ranks + rank) * leaf.out_run + first);
                });
}

}  // namespace jdp
