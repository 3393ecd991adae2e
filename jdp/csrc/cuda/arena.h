// Which parts of the arena are taken. Knows offsets, not memory.

#pragma once

#include <cstdint>
#include <map>

namespace jdp {

class Arena {
 public:
  explicit Arena(int64_t capacity) : capacity_(capacity) {}

  // The begin of the first gap of `bytes`, a multiple of 256; -1: there is none.
  int64_t take(int64_t bytes) {
    const int64_t size = rounded(bytes);
    int64_t begin = 0;
    for (const auto& [taken, taken_size] : taken_) {
      if (taken - begin >= size) break;
      begin = taken + taken_size;
    }
    if (begin + size > capacity_) return -1;
    taken_[begin] = size;
    used_ += size;
    return begin;
  }

  void give_back(int64_t begin) {
    const auto found = taken_.find(begin);
    if (found == taken_.end()) return;
    used_ -= found->second;
    taken_.erase(found);
  }

  void clear() {
    taken_.clear();
    used_ = 0;
  }

  void resize(int64_t capacity) { capacity_ = capacity; }

  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }

 private:
  // Something is taken even for a bucket of nothing, so that every begin is another.
  static int64_t rounded(int64_t bytes) { return bytes > 0 ? (bytes + 255) / 256 * 256 : 256; }

  int64_t capacity_;
  int64_t used_ = 0;
  std::map<int64_t, int64_t> taken_;  // begin: size
};

}  // namespace jdp
