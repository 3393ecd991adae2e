#include "own_threads.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "float_mode.h"

namespace jdp {
namespace {

// Threads are kept, as many as the largest number of concurrent tasks.
class Threads {
 public:
  void run(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
      if (tasks_.size() <= num_idle_) {
        has_task_.notify_one();
        return;
      }
    }
    // Detached: at exit the thread may still be waiting for a task.
    std::thread([this] { work(); }).detach();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++num_idle_;
      has_task_.wait(lock, [&] { return !tasks_.empty(); });
      --num_idle_;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_task_;
  std::deque<std::function<void()>> tasks_;
  size_t num_idle_ = 0;  // threads that wait for a task or were just woken
};

Threads& threads() {
  static Threads* only = new Threads;  // outlives its threads
  return *only;
}

}  // namespace

void run_on_own_thread(std::function<void()> task) {
  threads().run([task = std::move(task), mode = float_mode()] {
    set_float_mode(mode);
    task();
  });
}

}  // namespace jdp
