// A bucket: leaves that are reduced together. They need not be contiguous in memory.

#pragma once

#include <algorithm>
#include <cstdint>
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

struct Leaf {
  const void* in;
  void* out;      // may be `in`
  int64_t count;  // elements
};

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

  // Whether both have the same type and the same leaf sizes.
  bool fits(const Bucket& other) const { return type_ == other.type_ && begins_ == other.begins_; }

  // Returns a hash of the type and of all leaf sizes (FNV-1a).
  uint64_t fingerprint() const {
    uint64_t hash = 14695981039346656037u ^ static_cast<uint64_t>(type_);
    for (int64_t begin : begins_) hash = (hash ^ static_cast<uint64_t>(begin)) * 1099511628211u;
    return hash;
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

 private:
  Type type_;
  std::vector<Leaf> leaves_;
  std::vector<int64_t> begins_;  // offset of each leaf in elements; the last one is the total
};

}  // namespace jdp
