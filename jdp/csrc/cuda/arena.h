// An allocator of regions of the arena. It manages offsets, not memory.

#pragma once

#include <cstdint>
#include <map>

namespace jdp {

class Arena {
 public:
  explicit Arena(int64_t capacity) : capacity_(capacity) {}

  // Returns the offset of the first gap that fits, a multiple of 256; -1: none does.
  int64_t allocate(int64_t bytes) {
    const int64_t size = rounded(bytes);
    int64_t begin = 0;
    for (const auto& [offset, size_here] : regions_) {
      if (offset - begin >= size) break;
      begin = offset + size_here;
    }
    if (begin + size > capacity_) return -1;
    regions_[begin] = size;
    used_ += size;
    return begin;
  }

  void free(int64_t begin) {
    const auto found = regions_.find(begin);
    if (found == regions_.end()) return;
    used_ -= found->second;
    regions_.erase(found);
  }

  void clear() {
    regions_.clear();
    used_ = 0;
  }

  void resize(int64_t capacity) { capacity_ = capacity; }

  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }

 private:
  // An empty bucket takes space too, so that offsets are unique.
  static int64_t rounded(int64_t bytes) { return bytes > 0 ? (bytes + 255) / 256 * 256 : 256; }

  int64_t capacity_;
  int64_t used_ = 0;
  std::map<int64_t, int64_t> regions_;  // offset: size
};

}  // namespace jdp
