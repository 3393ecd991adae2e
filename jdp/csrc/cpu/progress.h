// Counters of this process's collectives, which other processes read while it runs or hangs.

#pragma once

#include <atomic>
#include <cstdint>

namespace jdp {

// Is in memory that other processes may read. Each rank counts each of its all-reduces once. The
// counters are relaxed: they synchronize nothing, and a reader may see slightly old values.
struct Progress {
  std::atomic<int64_t> num_entered;
  std::atomic<int64_t> num_done;
  std::atomic<int64_t> bucket;  // of the last one entered
  // How long this process has waited for other processes, from when its own ranks had all entered a
  // collective until the last rank of another process did.
  std::atomic<int64_t> waited_ns;
};
static_assert(sizeof(Progress) == 32 && std::atomic<int64_t>::is_always_lock_free,
              "jdp/worker/progress_board.py reads four plain numbers");

// Counts all-reduces that start from now on in `progress`. Before the first call, they are counted
// in private memory.
void set_progress(Progress* progress);

// Adds to the time that this process has waited for others.
void add_wait(int64_t wait_ns);

// Counts one rank's all-reduce: as entered when constructed, as done when destroyed, even after an
// error.
class ProgressScope {
 public:
  explicit ProgressScope(int32_t bucket);
  ProgressScope(const ProgressScope&) = delete;
  ~ProgressScope();

 private:
  Progress* const progress_;
};

}  // namespace jdp
