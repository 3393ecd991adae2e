#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "reduce.h"

namespace jdp {
namespace {

// Stays in the L1 cache while it is copied to all ranks.
constexpr int64_t kBlockBytes = 4096;

using Buckets = std::vector<const Bucket*>;

template <typename T>
void sum_tile(const Call& call, const Buckets& buckets, int64_t begin, int64_t size) {
  const int num_ranks = call.num_ranks;
  const auto scale = static_cast<typename Element<T>::Scale>(call.scale);
  std::vector<const T*> inputs(num_ranks);
  std::vector<T*> outputs(num_ranks);
  buckets[0]->pieces(begin, size, [&](size_t index, int64_t first, int64_t length, int64_t) {
    const int64_t run = buckets[0]->leaf(index).run;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const Leaf& leaf = buckets[rank]->leaf(index);
      inputs[rank] = static_cast<const T*>(leaf.in) + first;
      outputs[rank] = static_cast<T*>(leaf.out) + (run > 0 ? 0 : first);
    }
    if (run > 0) {
      reduce_to_slices<T>(inputs.data(), num_ranks, outputs.data(), run, first, length, scale);
    } else {
      reduce<T>(inputs.data(), num_ranks, outputs.data(), num_ranks, length, scale);
    }
  });
}

// Returns `size` bytes of a whole leaf, from `begin`: where they are, if they are in one run, else
// gathered in `block`. The leaf is not in place.
const std::byte* gathered(const Buckets& buckets, size_t index, int64_t begin, int64_t size,
                          std::byte* block) {
  const int num_ranks = static_cast<int>(buckets.size());
  const std::byte* result = block;
  runs_of_whole(buckets[0]->leaf(index).run, num_ranks, begin, size,
                [&](int rank, int64_t at, int64_t offset, int64_t length) {
                  const auto* slice = static_cast<const std::byte*>(buckets[rank]->leaf(index).in);
                  if (length == size) {
                    result = slice + at;
                  } else {
                    std::memcpy(block + offset, slice + at, length);
                  }
                });
  return result;
}

// Copies `size` bytes of a whole leaf in place, from `begin`, to the ranks that do not own them.
void gather_in_place(const Buckets& buckets, size_t index, int64_t begin, int64_t size) {
  const int num_ranks = static_cast<int>(buckets.size());
  runs_of_whole(buckets[0]->leaf(index).run, num_ranks, begin, size,
                [&](int owner, int64_t, int64_t offset, int64_t length) {
                  const auto* whole = static_cast<const std::byte*>(buckets[owner]->leaf(index).in);
                  const std::byte* const from = whole + begin + offset;
                  for (int rank = 0; rank < num_ranks; ++rank) {
                    if (rank == owner) continue;
                    auto* to = static_cast<std::byte*>(buckets[rank]->leaf(index).out);
                    std::memcpy(to + begin + offset, from, length);
                  }
                });
}

void gather_tile(const Buckets& buckets, int64_t begin, int64_t size) {
  alignas(64) std::byte block[kBlockBytes];
  buckets[0]->pieces(begin, size, [&](size_t index, int64_t first, int64_t length, int64_t) {
    for (int64_t done = 0; done < length; done += kBlockBytes) {
      const int64_t part = std::min(kBlockBytes, length - done);
      if (buckets[0]->leaf(index).is_in_place()) {
        gather_in_place(buckets, index, first + done, part);
        continue;
      }
      const std::byte* from = gathered(buckets, index, first + done, part, block);
      for (const Bucket* bucket : buckets) {
        std::memcpy(static_cast<std::byte*>(bucket->leaf(index).out) + first + done, from, part);
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
