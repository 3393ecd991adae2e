// Waiting: spin briefly, then sleep, with a deadline.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "../common/status.h"

namespace jdp {

// A number that only grows (modulo 2^32), on which threads, or processes that share its memory, can
// wait. Two cache lines, because CPUs prefetch them in pairs.
struct alignas(128) Counter {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> num_sleepers{0};
};

inline bool reached(const Counter& counter, uint32_t target) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - target) >= 0;
}

// Wakes sleepers. A thread that sees `value` reached also sees all earlier writes.
void advance(Counter& counter, uint32_t value);

// Wakes sleepers, so that they check for aborts.
void wake(Counter& counter);

// Waits for `target`, some milliseconds at most; returns whether it was reached. Callers check
// between calls for aborts and deadlines.
bool wait_briefly(Counter& counter, uint32_t target);

// The time limit of every wait of this process.
void set_timeout_s(double timeout_s);
double timeout_s();

// The time on the clock that all processes of this host share.
int64_t now_ns();

// Measures a wait against the time limit.
class Stopwatch {
 public:
  double elapsed_s() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  bool expired() const { return elapsed_s() >= timeout_s(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Ends every wait of this process until `clear_abort`.
void abort_waits(const std::string& reason);
void clear_abort();
bool aborted();
std::string abort_reason();

// "ranks 2, 3"
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace jdp
