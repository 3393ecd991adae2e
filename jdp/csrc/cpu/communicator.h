// Ranks of several processes of one host: they meet in a segment.

#pragma once

#include "segment.h"

namespace jdp {

// `all_reduce` where `call.communicator` is not 0.
//
// Rounds of what fits a slot go through three stages: a rank copies its elements into its slot,
// sums its own chunk over all ranks, in their order, and copies the other chunks' results. Stages
// of three rounds overlap. Small buckets are summed whole by every rank, which saves the second
// wait.
Status all_reduce_in_segment(const Call& call, const Bucket& bucket);

// From now on calls for this communicator and group go through `segment`.
void attach_communicator(int64_t communicator, int32_t group, std::shared_ptr<Segment> segment);

// Ends the waits of all processes in all communicators that this one takes part in.
void stop_communicators(const std::string& reason);

// Begins anew in all communicators, with counters of 0. False, and why, if one cannot be used any
// more. Every process must do so, in any order and any number of times: they meet in the newest
// segment. No all-reduce of this process may be running; those of others end with an error.
bool renew_communicators(std::string* why);

// Leaves all communicators. No all-reduce may be running.
void detach_communicators();

}  // namespace jdp
