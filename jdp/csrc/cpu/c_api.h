// The C interface that Python calls through ctypes.

#pragma once

#include <cstdint>

#define JDP_EXPORT __attribute__((visibility("default")))

extern "C" {

// The time limit of every wait of this process, in seconds, > 0. The default is 300.
JDP_EXPORT void jdp_set_timeout_s(double timeout_s);
JDP_EXPORT double jdp_timeout_s();

// Ends all current and later waits with `reason` in their errors, in this process and in all
// processes that share a communicator with it.
JDP_EXPORT void jdp_abort(const char* reason);

// Clears an abort and earlier failures, and restarts all communicators. Every process of a
// communicator must call it, in any order; the first all-reduce waits until all have. No all-reduce
// may be running in this process.
//
// Returns: 0; -1, and sets `jdp_last_error`, if a communicator cannot be restarted.
JDP_EXPORT int jdp_reset();

// Counts all later all-reduces in `progress`: [4] int64, see `Progress` in progress.h. The memory
// must stay valid until the process ends.
JDP_EXPORT void jdp_set_progress(void* progress);

// Creates the memory of a communicator. All its processes then attach it, this one included.
//
// Returns: a file descriptor, which must stay open while the memory is attached; -1, and sets
// `jdp_last_error`.
JDP_EXPORT int jdp_segment_create(int32_t num_ranks, uint64_t* nonce);

// Attaches this process's ranks to the memory that process `pid` of this host created.
//
// Args:
//   communicator: the key that calls use, not 0. Attaching it again replaces it.
//   group: number of the group of ranks that reduce together; its ranks are 0 to num_ranks - 1.
//   local_ranks: [num_local] this process's ranks.
//   nonce: from jdp_segment_create; a different one means that `pid` now names another process.
// Returns: 0; -1, and sets `jdp_last_error`.
JDP_EXPORT int jdp_communicator_attach(int64_t communicator, int32_t group, int32_t num_ranks,
                                       const int32_t* local_ranks, int32_t num_local, int32_t pid,
                                       int32_t fd, uint64_t nonce);

// The error message of this thread's last failed call.
JDP_EXPORT const char* jdp_last_error();
}
