// Collectives between threads of one process.

#pragma once

#include "call.h"

namespace jdp {

// Runs `collective` if `call.communicator` is 0.
Status collective_in_process(const Call& call, const Bucket& bucket);

// Discards failed rendezvous and restarts the count of calls at 1. No call may be running.
void forget_rendezvous();

}  // namespace jdp
