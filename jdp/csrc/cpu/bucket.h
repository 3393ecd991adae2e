// Leaves that one call reduces, gathers or exchanges. They need not be contiguous in memory.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../common/element.h"

namespace jdp {

// Calls `visitor` with a zero element of `type`.
template <typename Visitor>
auto visit(Type type, Visitor visitor) {
  switch (type) {
    case Type::kF32:
      return visitor(float{});
    case Type::kF64:
      return visitor(double{});
    case Type::kBF16:
      return visitor(BFloat16{});
    case Type::kF16:
      return visitor(Float16{});
    case Type::kU8:
      return visitor(uint8_t{});
    case Type::kU16:
      return visitor(uint16_t{});
    case Type::kU32:
      return visitor(uint32_t{});
    default:
      return visitor(uint64_t{});
  }
}

// In a reduce-scatter `in` is the whole leaf and `out` a slice of it, in an all-gather the reverse.
// A whole leaf has rows, and each row has one run of elements for each rank:
// [num_rows][num_ranks][run]. A rank's slice holds its runs: [num_rows][run]. A leaf of a
// reduce-scatter without runs stays whole: each rank gets all of its sums.
//
// An all-gather of a leaf may be in place: `in` is the whole leaf `out`, in which this rank's slice
// is in its place. Only that is read, and only the others are written.
//
// In an all-to-all both are whole leaves. A slice has its elements in the same order in both, in
// other runs.
struct Leaf {
  const void* in;
  void* out;            // may be `in` in an all-reduce and in an all-gather
  int64_t count;        // elements of the whole leaf
  int64_t run = 0;      // elements of a slice in one row; 0 for an uncut leaf
  int64_t out_run = 0;  // the same of `out`; 0 but in an all-to-all

  // Whether an all-gather is in place.
  bool is_in_place() const { return run > 0 && count > 0 && in == out; }

  // Elements that a rank gets in a reduce-scatter, or gives in the other two.
  int64_t slice_count(int num_ranks) const { return run > 0 ? count / num_ranks : count; }
};

// Calls visitor(rank, at, offset, size) for each run in elements [begin, begin + size) of a whole
// leaf. The run is elements [at, at + size) of the rank's slice; `offset` is relative to `begin`.
template <typename Visitor>
void runs_of_whole(int64_t run, int num_ranks, int64_t begin, int64_t size, Visitor visitor) {
  int64_t row = begin / run / num_ranks;
  int rank = static_cast<int>(begin / run % num_ranks);
  int64_t first = begin % run;
  for (int64_t done = 0; done < size; first = 0) {
    const int64_t length = std::min(size - done, run - first);
    visitor(rank, row * run + first, done, length);
    done += length;
    if (++rank == num_ranks) {
      rank = 0;
      ++row;
    }
  }
}

// Calls visitor(row, first, offset, size) for each run in elements [begin, begin + size) of a
// slice. It is elements [first, first + size) of the run in `row`; `offset` is relative to `begin`.
template <typename Visitor>
void runs_of_slice(int64_t run, int64_t begin, int64_t size, Visitor visitor) {
  int64_t row = begin / run;
  int64_t first = begin % run;
  for (int64_t done = 0; done < size; first = 0, ++row) {
    const int64_t length = std::min(size - done, run - first);
    visitor(row, first, done, length);
    done += length;
  }
}

// Copies elements [begin, begin + size) of a rank's slice in `whole`.
template <typename T>
void copy_from_slice(const T* whole, int64_t run, int rank, int num_ranks, int64_t begin,
                     int64_t size, T* to) {
  runs_of_slice(run, begin, size, [&](int64_t row, int64_t first, int64_t done, int64_t length) {
    std::memcpy(to + done, whole + (row * num_ranks + rank) * run + first, length * sizeof(T));
  });
}

class Bucket {
 public:
  Bucket(Type type, std::vector<Leaf> leaves) : type_(type), leaves_(std::move(leaves)) {
    begins_.reserve(leaves_.size() + 1);
    begins_.push_back(0);
    for (const Leaf& leaf : leaves_) begins_.push_back(begins_.back() + leaf.count);
  }

  Type type() const { return type_; }
  int64_t count() const { return begins_.back(); }
  const Leaf& leaf(size_t index) const { return leaves_[index]; }

  // Whether both have the same type, leaf sizes and slices, and gather the same leaves in place.
  bool fits(const Bucket& other) const {
    return type_ == other.type_ && begins_ == other.begins_ &&
           std::equal(leaves_.begin(), leaves_.end(), other.leaves_.begin(),
                      [](const Leaf& one, const Leaf& two) {
                        return one.run == two.run && one.out_run == two.out_run &&
                               one.is_in_place() == two.is_in_place();
                      });
  }

  // Returns a hash of type, leaf sizes and slices (FNV-1a).
  uint64_t fingerprint() const {
    uint64_t hash = 14695981039346656037u ^ static_cast<uint64_t>(type_);
    const auto add = [&](int64_t number) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211u;
    };
    for (int64_t begin : begins_) add(begin);
    for (const Leaf& leaf : leaves_) {
      add(leaf.run);
      add(leaf.out_run);
    }
    return hash;
  }

  // Elements of one rank's slices together.
  int64_t slice_count(int num_ranks) const {
    int64_t total = 0;
    for (const Leaf& leaf : leaves_) total += leaf.slice_count(num_ranks);
    return total;
  }

  // Calls visitor(index, first, size, offset) for each part of a leaf in elements [begin, begin +
  // size) of the bucket: `first` is relative to the leaf, `offset` to `begin`.
  template <typename Visitor>
  void pieces(int64_t begin, int64_t size, Visitor visitor) const {
    const auto after = std::upper_bound(begins_.begin(), begins_.end(), begin);
    int64_t done = 0;
    for (size_t leaf = after - begins_.begin() - 1; done < size; ++leaf) {
      const int64_t first = begin + done - begins_[leaf];
      const int64_t length = std::min(size - done, leaves_[leaf].count - first);
      if (length > 0) visitor(leaf, first, length, done);
      done += length;
    }
  }

  // The same for elements of one rank's slices, concatenated.
  template <typename Visitor>
  void slice_pieces(int num_ranks, int64_t begin, int64_t size, Visitor visitor) const {
    int64_t leaf_begin = 0, done = 0;
    for (size_t leaf = 0; done < size; ++leaf) {
      const int64_t count = leaves_[leaf].slice_count(num_ranks);
      const int64_t first = begin + done - leaf_begin;
      const int64_t length = std::min(size - done, count - first);
      if (length > 0) {
        visitor(leaf, first, length, done);
        done += length;
      }
      leaf_begin += count;
    }
  }

 private:
  Type type_;
  std::vector<Leaf> leaves_;
  std::vector<int64_t> begins_;  // offset of each leaf in elements; the last one is the total
};

}  // namespace jdp
