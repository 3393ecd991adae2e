// How many blocks of each device are spoken for. Blocks of a ring wait for those of other ranks, so
// all that may run at the same time must fit on the device at the same time: two communicators that
// each fill a device would wait for each other.

#pragma once

#include <map>
#include <mutex>
#include <string>

#include "../common/status.h"

namespace jdp {

class Residency {
 public:
  // `capacity`: blocks that the device runs at once.
  Status take(int device, int num_blocks, int capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    int& taken = taken_[device];
    if (num_blocks > capacity - taken) {
      return {Code::kUnavailable, "jdp: GPU " + std::to_string(device) + " runs " +
                                      std::to_string(capacity) + " blocks at once; " +
                                      std::to_string(taken) +
                                      " belong to other communicators of this process, and " +
                                      std::to_string(num_blocks) + " more are needed"};
    }
    taken += num_blocks;
    return {};
  }

  void give_back(int device, int num_blocks) {
    std::lock_guard<std::mutex> lock(mutex_);
    taken_[device] -= num_blocks;
  }

 private:
  std::mutex mutex_;
  std::map<int, int> taken_;
};

}  // namespace jdp
