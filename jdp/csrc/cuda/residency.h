// Counts the reserved blocks of each device. Blocks of a ring wait for blocks of other ranks, so
// all must be resident at once: two communicators that each fill a device would wait for each
// other.

#pragma once

#include <map>
#include <mutex>
#include <string>

#include "../common/status.h"

namespace jdp {

class Residency {
 public:
  // `capacity`: blocks that the device runs at once.
  Status reserve(int device, int num_blocks, int capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    int& reserved = reserved_[device];
    if (num_blocks > capacity - reserved) {
      return {Code::kUnavailable, "jdp: GPU " + std::to_string(device) + " runs " +
                                      std::to_string(capacity) + " blocks at once; " +
                                      std::to_string(reserved) +
                                      " are reserved by other communicators of this process, and " +
                                      std::to_string(num_blocks) + " more are needed"};
    }
    reserved += num_blocks;
    return {};
  }

  void release(int device, int num_blocks) {
    std::lock_guard<std::mutex> lock(mutex_);
    reserved_[device] -= num_blocks;
  }

 private:
  std::mutex mutex_;
  std::map<int, int> reserved_;
};

}  // namespace jdp
