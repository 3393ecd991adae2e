// jdp's own threads, for calls that must not block a thread of XLA.

#pragma once

#include <functional>

namespace jdp {

// Runs `task` on a thread without other tasks, in the caller's float mode, since XLA may run later
// operations on it.
void run_on_own_thread(std::function<void()> task);

}  // namespace jdp
