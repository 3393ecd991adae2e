// What Python calls, through ctypes.

#pragma once

#include <cstdint>

#define JDP_EXPORT __attribute__((visibility("default")))

extern "C" {

// The deadline of every wait of this process, in seconds, > 0. 300 to begin with.
JDP_EXPORT void jdp_set_timeout_s(double timeout_s);
JDP_EXPORT double jdp_timeout_s();

// Ends every wait at once, and all later ones, with `reason` in their errors; in this process, and
// in all that share a communicator with it.
JDP_EXPORT void jdp_abort(const char* reason);

// Forgets an abort and what failed, and begins anew in all communicators. Every process of a
// communicator must do so, in any order; the first all-reduce waits for those that have not yet. No
// all-reduce may be running in this process.
//
// Returns: 0; -1, and `jdp_last_error`, if a communicator cannot be used any more.
JDP_EXPORT int jdp_reset();

// From now on counts all-reduces in `progress`: [3] int64, see `Progress` in progress.h, which must
// stay valid as long as the process runs.
JDP_EXPORT void jdp_set_progress(void* progress);

// Makes memory for the ranks of a communicator, which all processes then attach, this one included.
//
// Returns: an open file, which stays open as long as it is attached; -1, and `jdp_last_error`, if
// there is
//   no such memory.
JDP_EXPORT int jdp_segment_create(int32_t num_ranks, uint64_t* nonce);

// Takes the seats of this process's ranks in the memory that process `pid` of this host made.
//
// Args:
//   communicator: key for calls, not 0. Attaching it again replaces it.
//   group: of the ranks that reduce among themselves; its ranks are 0 to num_ranks - 1.
//   local_ranks: [num_local] this process's ranks.
//   nonce: as the maker was told; another one means that `pid` is another process by now.
// Returns: 0; -1, and `jdp_last_error`.
JDP_EXPORT int jdp_communicator_attach(int64_t communicator, int32_t group, int32_t num_ranks,
                                       const int32_t* local_ranks, int32_t num_local, int32_t pid,
                                       int32_t fd, uint64_t nonce);

// Why this thread's last call failed.
JDP_EXPORT const char* jdp_last_error();
}
