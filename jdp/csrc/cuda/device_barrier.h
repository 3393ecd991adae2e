// A barrier of the host threads that run a program on this process's devices.
//
// While a ring waits for a peer, a CUDA call on another thread may load a kernel, which can wait
// for the ring while it holds a driver lock that the peer's launch needs. So no device launches a
// ring before all have reached it, and none continues before all have launched theirs. XLA does the
// same for its own collectives (openxla/xla PR 38932), but not for a custom call.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "../common/status.h"

namespace jdp {

class DeviceBarrier {
 public:
  // All others wait for the device. No thread may be waiting.
  void add_device(int32_t ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    members_.insert(ordinal);
  }

  // Returns whether the device was the last one.
  bool remove_device(int32_t ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    members_.erase(ordinal);
    arrived_.erase(ordinal);
    if (!arrived_.empty() && arrived_.size() == members_.size()) pass();
    return members_.empty();
  }

  // Returns when all devices have reached `where`. A `timeout_s` of 0 means no limit. All get the
  // first error, until `reset`.
  Status wait(int32_t ordinal, const std::string& where, double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (arrived_.empty()) {
      where_ = where;
    } else if (where_ != where) {
      return fail(
          {Code::kFailedPrecondition, "jdp: device " + std::to_string(ordinal) + " reached " +
                                          where + " while other devices of this process reached " +
                                          where_ + ". All devices must run the same program"});
    }
    arrived_.insert(ordinal);
    if (arrived_.size() >= members_.size()) {
      pass();
      return {};
    }
    const uint64_t round = round_;
    const auto ended = [&] { return round_ != round || !failure_.ok(); };
    if (timeout_s <= 0 || timeout_s > kLongestS) {
      changed_.wait(lock, ended);
    } else if (!changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), ended)) {
      return fail({Code::kDeadlineExceeded, "jdp: device " + std::to_string(ordinal) + " waited " +
                                                std::to_string(timeout_s) + " s at " + where +
                                                " for device" + missing() + " of this process"});
    }
    return round_ != round ? Status() : failure_;
  }

  // Ends all current and later waits; the first error is kept.
  void abort(const Status& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    fail(why);
  }

  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = {};
    arrived_.clear();
  }

 private:
  static constexpr double kLongestS = 1e9;  // 30 years; more overflows the clock

  void pass() {
    ++round_;
    arrived_.clear();
    changed_.notify_all();
  }

  Status fail(const Status& why) {
    if (failure_.ok()) failure_ = why;
    changed_.notify_all();
    return failure_;
  }

  std::string missing() const {
    std::string list;
    for (int32_t member : members_) {
      if (!arrived_.count(member)) list += (list.empty() ? " " : ", ") + std::to_string(member);
    }
    return list;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<int32_t> members_;
  std::set<int32_t> arrived_;
  std::string where_;  // the point that `arrived_` have reached
  uint64_t round_ = 0;
  Status failure_;
};

}  // namespace jdp
