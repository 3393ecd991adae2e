#include "wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <mutex>

namespace jdp {
namespace {

// Ranks with equal work rarely differ by more. A sleep costs half as much.
constexpr std::chrono::microseconds kSpin(100);
// The longest sleep between two checks for aborts, deadlines and dead peers.
constexpr long kNapNs = 20'000'000;

// Processes may compile for minutes before they communicate.
std::atomic<double> timeout{300.0};
std::atomic<bool> is_aborted{false};
std::mutex reason_mutex;
std::string& reason() {
  static std::string* text = new std::string;  // outlives threads that still wait at exit
  return *text;
}

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE_FLAG: processes may share the word's memory.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* nap) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nap, nullptr, 0);
}

}  // namespace

void advance(Counter& counter, uint32_t value) {
  // Sequentially consistent, as in wait_briefly: either the sleeper sees the new value, or this
  // thread sees the sleeper.
  counter.value.store(value, std::memory_order_seq_cst);
  if (counter.num_sleepers.load(std::memory_order_seq_cst) > 0) wake(counter);
}

void wake(Counter& counter) { futex(counter.value, FUTEX_WAKE, INT_MAX, nullptr); }

bool wait_briefly(Counter& counter, uint32_t target) {
  if (reached(counter, target)) return true;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (reached(counter, target)) return true;
      pause();
    }
    // The awaited rank may need this core.
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  counter.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
  if (static_cast<int32_t>(seen - target) < 0) {
    const timespec nap{0, kNapNs};
    futex(counter.value, FUTEX_WAIT, seen, &nap);
  }
  counter.num_sleepers.fetch_sub(1, std::memory_order_relaxed);
  return reached(counter, target);
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

void set_timeout_s(double timeout_s) { timeout.store(timeout_s); }

double timeout_s() { return timeout.load(); }

void abort_waits(const std::string& why) {
  const std::lock_guard<std::mutex> lock(reason_mutex);
  reason() = why;
  is_aborted.store(true);
}

void clear_abort() { is_aborted.store(false); }

bool aborted() { return is_aborted.load(std::memory_order_relaxed); }

std::string abort_reason() {
  const std::lock_guard<std::mutex> lock(reason_mutex);
  return reason();
}

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace jdp
