// What others see of this process's all-reduces while it runs, or hangs.

#pragma once

#include <atomic>
#include <cstdint>

namespace jdp {

// In memory that other processes may read. A rank counts once for each of its all-reduces. Nobody
// orders anything by these numbers: whoever reads them sees what may be a moment old.
struct Progress {
  std::atomic<int64_t> num_entered;
  std::atomic<int64_t> num_done;
  std::atomic<int64_t> bucket;  // of the last one entered
};
static_assert(sizeof(Progress) == 24 && std::atomic<int64_t>::is_always_lock_free,
              "jdp/worker/progress_board.py reads three plain numbers");

// From now on all-reduces that begin are counted there; in memory of our own before.
void set_progress(Progress* progress);

// One rank's all-reduce, from its begin to its end, whatever that is.
class Underway {
 public:
  explicit Underway(int32_t bucket);
  Underway(const Underway&) = delete;
  ~Underway();

 private:
  Progress* const progress_;
};

}  // namespace jdp
