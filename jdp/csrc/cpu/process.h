// Identifies a process, even after its pid was reused.

#pragma once

#include <cstdint>

namespace jdp {

// A process of this host: its pid, and the lowest bits of its start time. 0: none.
using Process = uint64_t;

// Returns this process; 0 if /proc cannot be read.
Process this_process();

inline int pid_of(Process process) { return static_cast<int>(process >> 40); }

// Whether the process has ended, as a zombie has. False if /proc cannot be read.
//
// A file lock would not do: the kernel releases POSIX locks when any code in the process closes the
// file, and forked children inherit other locks.
bool has_ended(Process process);

}  // namespace jdp
