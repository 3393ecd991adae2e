// A barrier of the host threads that run a program on this process's devices.
//
// While a ring waits for a peer, a CUDA call on another thread may load a kernel, which can wait
// for the ring while it holds a lock of the driver that the peer's launch needs. So no device
// launches a ring before all have come to it, and none goes on before all have launched theirs.
// XLA does the same for its own collectives (openxla/xla PR 38932), and not for a foreign call.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "../common/status.h"

namespace jdp {

class Rendezvous {
 public:
  // From now on all wait for this device, too; nobody may be waiting.
  void enter(int32_t ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    members_.insert(ordinal);
  }

  // A device that leaves is waited for no longer. True: it was the last.
  bool leave(int32_t ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    members_.erase(ordinal);
    arrived_.erase(ordinal);
    if (!arrived_.empty() && arrived_.size() == members_.size()) pass();
    return members_.empty();
  }

  // Returns when all devices have come to `where`; `timeout_s` of 0: waits for ever. An error is
  // everybody's, until `reset`.
  Status join(int32_t ordinal, const std::string& where, double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (arrived_.empty()) {
      where_ = where;
    } else if (where_ != where) {
      return fail({Code::kFailedPrecondition,
                   "jdp: device " + std::to_string(ordinal) + " comes to " + where +
                       " where others of this process come to " + where_ +
                       ": they would add up what does not belong together"});
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

  // Ends all waits with this error, and those to come. The first one stays.
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
  static constexpr double kLongestS = 1e9;  // 30 years; more does not fit into a clock

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
  std::string where_;  // they come to
  uint64_t round_ = 0;
  Status failure_;
};

}  // namespace jdp
