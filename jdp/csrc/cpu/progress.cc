#include "progress.h"

namespace jdp {
namespace {

Progress own;
std::atomic<Progress*> current{&own};

}  // namespace

void set_progress(Progress* progress) { current.store(progress, std::memory_order_release); }

void add_wait(int64_t wait_ns) {
  current.load(std::memory_order_acquire)->waited_ns.fetch_add(wait_ns, std::memory_order_relaxed);
}

ProgressScope::ProgressScope(int32_t bucket) : progress_(current.load(std::memory_order_acquire)) {
  progress_->bucket.store(bucket, std::memory_order_relaxed);
  progress_->num_entered.fetch_add(1, std::memory_order_relaxed);
}

ProgressScope::~ProgressScope() { progress_->num_done.fetch_add(1, std::memory_order_relaxed); }

}  // namespace jdp
