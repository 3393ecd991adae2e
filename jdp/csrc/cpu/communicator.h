// All-reduce between processes of one host, through a shared-memory segment.

#pragma once

#include "segment.h"

namespace jdp {

// `all_reduce` where `call.communicator` is not 0.
//
// A bucket is reduced in rounds of one slot. Each round has three stages: a rank copies its
// elements into its slot, sums its own chunk over all ranks in rank order, and copies the results
// of the other chunks. The stages of three consecutive rounds overlap. Small buckets take one shot:
// every rank sums the whole bucket, which saves the second wait.
Status all_reduce_in_segment(const Call& call, const Bucket& bucket);

// Routes all later calls for this communicator and group through `segment`.
void attach_communicator(int64_t communicator, int32_t group, std::shared_ptr<Segment> segment);

// Ends the waits of all processes, in all communicators of this process.
void stop_communicators(const std::string& reason);

// Restarts all communicators with counters of 0. Returns false and sets `why` if one cannot be
// restarted. Every process must call it, in any order and any number of times: all of them attach
// the latest segment. No all-reduce of this process may be running; all-reduces of other processes
// end with an error.
bool renew_communicators(std::string* why);

// Leaves all communicators. No all-reduce may be running.
void detach_communicators();

}  // namespace jdp
