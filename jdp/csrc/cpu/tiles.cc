#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "reduce.h"

namespace jdp {
namespace {

// A gathered block stays in the L1 cache while it is copied to all ranks.
constexpr int64_t kBlockBytes = 4096;

using Buckets = std::vector<const Bucket*>;

template <typename T>
void sum_tile(const Call& call, const Buckets& buckets, int64_t begin, int64_t size) {
  const int num_ranks = call.num_ranks;
  const auto scale = static_cast<typename Element<T>::Scale>(call.scale);
  const bool is_scattered = call.operation == Operation::kReduceScatter;
  std::vector<const T*> inputs(num_ranks);
  std::vector<T*> outputs(num_ranks);
  buckets[0]->pieces(begin, size, [&](size_t index, int64_t first, int64_t length, int64_t) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      const Leaf& leaf = buckets[rank]->leaf(index);
      inputs[rank] = static_cast<const T*>(leaf.in) + first;
      outputs[rank] = static_cast<T*>(leaf.out) + (is_scattered ? 0 : first);
    }
    if (is_scattered) {
      reduce_to_slices<T>(inputs.data(), num_ranks, outputs.data(), buckets[0]->leaf(index).run,
                          first, length, scale);
    } else {
      reduce<T>(inputs.data(), num_ranks, outputs.data(), num_ranks, length, scale);
    }
  });
}

// Returns `size` bytes of a whole leaf, from `begin`: where they are, if they are part of one run,
// else gathered in `block`.
const std::byte* gathered(const Buckets& buckets, size_t index, int64_t begin, int64_t size,
                          std::byte* block) {
  const int num_ranks = static_cast<int>(buckets.size());
  const std::byte* result = block;
  runs_of_whole(buckets[0]->leaf(index).run, num_ranks, begin, size,
                [&](int rank, int64_t at, int64_t offset, int64_t length) {
                  const Leaf& leaf = buckets[rank]->leaf(index);
                  const std::byte* from = static_cast<const std::byte*>(leaf.in) +
                                          (leaf.is_in_place() ? begin + offset : at);
                  if (length == size) {
                    result = from;
                  } else {
                    std::memcpy(block + offset, from, length);
                  }
                });
  return result;
}

// Copies `size` bytes of a whole leaf, from `begin`, to a rank; in place, all but its own slice.
void copy_whole(const std::byte* from, const Leaf& leaf, int rank, int num_ranks, int64_t begin,
                int64_t size) {
  auto* const to = static_cast<std::byte*>(leaf.out) + begin;
  if (!leaf.is_in_place()) {
    std::memcpy(to, from, size);
    return;
  }
  runs_of_whole(leaf.run, num_ranks, begin, size,
                [&](int owner, int64_t, int64_t offset, int64_t length) {
                  if (owner != rank) std::memcpy(to + offset, from + offset, length);
                });
}

void gather_tile(const Buckets& buckets, int64_t begin, int64_t size) {
  alignas(64) std::byte block[kBlockBytes];
  buckets[0]->pieces(begin, size, [&](size_t index, int64_t first, int64_t length, int64_t) {
    for (int64_t done = 0; done < length; done += kBlockBytes) {
      const int64_t part = std::min(kBlockBytes, length - done);
      const std::byte* from = gathered(buckets, index, first + done, part, block);
      const int num_ranks = static_cast<int>(buckets.size());
      for (int rank = 0; rank < num_ranks; ++rank) {
        copy_whole(from, buckets[rank]->leaf(index), rank, num_ranks, first + done, part);
      }
    }
  });
}

// Each output has runs of all ranks: the tile is read from all inputs.
void exchange_tile(const Buckets& buckets, int64_t begin, int64_t size) {
  const int num_ranks = static_cast<int>(buckets.size());
  buckets[0]->pieces(begin, size, [&](size_t index, int64_t first, int64_t length, int64_t) {
    const Leaf& any = buckets[0]->leaf(index);
    for (int rank = 0; rank < num_ranks; ++rank) {
      auto* const to = static_cast<std::byte*>(buckets[rank]->leaf(index).out) + first;
      runs_of_whole(any.out_run, num_ranks, first, length,
                    [&](int from, int64_t at, int64_t offset, int64_t part) {
                      const auto* whole =
                          static_cast<const std::byte*>(buckets[from]->leaf(index).in);
                      copy_from_slice(whole, any.run, rank, num_ranks, at, part, to + offset);
                    });
    }
  });
}

}  // namespace

void do_tile(const Call& call, const Buckets& buckets, int64_t begin, int64_t size) {
  if (call.operation == Operation::kAllGather) return gather_tile(buckets, begin, size);
  if (call.operation == Operation::kAllToAll) return exchange_tile(buckets, begin, size);
  visit(buckets[0]->type(),
        [&](auto zero) { sum_tile<decltype(zero)>(call, buckets, begin, size); });
}

}  // namespace jdp
