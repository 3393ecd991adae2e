// Collectives between processes of one host, through a shared-memory segment.

#pragma once

#include "segment.h"

namespace jdp {

// Runs `collective` if `call.communicator` is not 0.
Status collective_in_segment(const Call& call, const Bucket& bucket);

// Routes later calls for this communicator and group through `segment`.
void attach_communicator(int64_t communicator, int32_t group, std::shared_ptr<Segment> segment);

// Ends the waits of all processes in this process's communicators.
void stop_communicators(const std::string& reason);

// Restarts all communicators with counters of 0; false sets `why`. Every process must call it, in
// any order and any number of times: all attach the latest segment. No call of this process may be
// running; calls of other processes end with an error.
bool renew_communicators(std::string* why);

// Leaves all communicators. No call may be running.
void detach_communicators();

}  // namespace jdp
