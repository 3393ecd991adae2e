// Which process is which, also after its number was given to another one.

#pragma once

#include <cstdint>

namespace jdp {

// A process of this host: its number, and the lowest bits of when it started. 0 is none.
using Process = uint64_t;

// This process; 0 if /proc does not tell.
Process this_process();

inline int pid_of(Process process) { return static_cast<int>(process >> 40); }

// Has it ended? One that waits for its parent has, too. False if that cannot be seen.
//
// /proc is asked, not a lock on a file of the process: the kernel releases POSIX locks when
// anything in the process closes that file, and other locks stay with the children that it forked.
bool has_ended(Process process);

}  // namespace jdp
