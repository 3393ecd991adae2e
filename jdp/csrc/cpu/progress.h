// Counters of this process's collectives, which other processes read.

#pragma once

#include <atomic>
#include <cstdint>

namespace jdp {

// Each rank counts each of its all-reduces once. The counters are relaxed: they synchronize
// nothing, and a reader may see slightly old values.
struct Progress {
  std::atomic<int64_t> num_entered;
  std::atomic<int64_t> num_done;
  std::atomic<int64_t> bucket;  // of the last one entered
  // How long this process has waited for others, from when its own ranks had all entered a
  // collective until the last rank of another process did.
  std::atomic<int64_t> waited_ns;
};
static_assert(sizeof(Progress) == 32 && std::atomic<int64_t>::is_always_lock_free,
              "jdp/worker/progress_board.py reads four plain numbers");

// Counts later all-reduces in `progress`; before the first call, in private memory.
void set_progress(Progress* progress);

void add_wait(int64_t wait_ns);

// Counts one all-reduce: as entered when constructed, as done when destroyed, even after an error.
class ProgressScope {
 public:
  explicit ProgressScope(int32_t bucket);
  ProgressScope(const ProgressScope&) = delete;
  ~ProgressScope();

 private:
  Progress* const progress_;
};

}  // namespace jdp
