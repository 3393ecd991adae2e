// CudaBlock's members (jdp/csrc/cuda/block.cuh) with host threads, so that the kernels' source runs
// under ThreadSanitizer, which reports a missing barrier or a relaxed flag as a data race.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <thread>

namespace jdp {

class Barrier {
 public:
  explicit Barrier(int num_threads) : num_threads_(num_threads) {}

  // Returns whether any thread passed true this time.
  bool arrive(bool said) {
    std::unique_lock<std::mutex> lock(mutex_);
    said_ = said_ || said;
    const uint64_t generation = generation_;
    if (++arrived_ == num_threads_) {
      arrived_ = 0;
      answer_ = said_;
      said_ = false;
      ++generation_;
      passed_.notify_all();
    } else {
      passed_.wait(lock, [&] { return generation_ != generation; });
    }
    return answer_;
  }

 private:
  const int num_threads_;
  std::mutex mutex_;
  std::condition_variable passed_;
  int arrived_ = 0;
  uint64_t generation_ = 0;
  bool said_ = false;
  bool answer_ = false;
};

struct HostBlock {
  Barrier* barrier;
  std::minstd_rand* random;  // of this thread; nullptr: no delays
  int index;
  int size;

  int thread() const { return index; }
  int num_threads() const { return size; }

  void sync() const { any(false); }

  bool any(bool said) const {
    if (random && (*random)() % 16 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds((*random)() % 100));
    }
    return barrier->arrive(said);
  }

  uint32_t load_acquire(const uint32_t* flag) const {
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
  }

  void store_release(uint32_t* flag, uint32_t value) const {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  }

  uint32_t exchange(uint32_t* flag, uint32_t value) const {
    return __atomic_exchange_n(flag, value, __ATOMIC_RELAXED);
  }

  uint64_t now_ns() const {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }

  void pause() const { std::this_thread::yield(); }
};

}  // namespace jdp
