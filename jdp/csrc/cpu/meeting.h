// Ranks that are threads of one process: each brings its bucket to a meeting.

#pragma once

#include "call.h"

namespace jdp {

// `all_reduce` where `call.communicator` is 0.
Status all_reduce_in_process(const Call& call, const Bucket& bucket);

// Forgets failed meetings and counts calls from 1 again. No all-reduce may be running.
void forget_meetings();

}  // namespace jdp
