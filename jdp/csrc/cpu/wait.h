// Waiting: spin shortly, then sleep, never without an end.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "../common/status.h"

namespace jdp {

// A number that only grows (modulo 2^32) and can be waited for, by threads or by processes that
// share its memory. A cache line of its own, and the one that is fetched beside it.
struct alignas(128) Counter {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> num_sleepers{0};
};

inline bool reached(const Counter& counter, uint32_t target) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - target) >= 0;
}

// Everything written before is seen by who finds `value` reached.
void advance(Counter& counter, uint32_t value);

// Lets sleepers look around.
void wake(Counter& counter);

// Waits until `target` is reached, at most some milliseconds: whoever waits longer calls this in a
// loop and looks in between whether waiting still makes sense. True if reached.
bool wait_briefly(Counter& counter, uint32_t target);

// The deadline of every wait of this process.
void set_timeout_s(double timeout_s);
double timeout_s();

// When a wait began, and whether it has taken too long.
class Stopwatch {
 public:
  double elapsed_s() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  bool expired() const { return elapsed_s() >= timeout_s(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Ends every wait of this process, present and future, until `clear_abort`.
void abort_waits(const std::string& reason);
void clear_abort();
bool aborted();
std::string abort_reason();

// "ranks 2, 3"
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace jdp
