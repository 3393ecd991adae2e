// One rank's call of a collective: its rank, its bucket and its group.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/status.h"
#include "bucket.h"
#include "wait.h"

namespace jdp {

// The result: the sum of the leaves of all ranks; this rank's slice of it; the whole leaves, of
// which each rank has a slice; or this rank's slices of the leaves of all ranks.
enum class Operation : int32_t {
  kAllReduce = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kAllToAll = 3
};

// The algorithm of an all-reduce. The other operations are always direct.
enum class Algorithm : int32_t { kDirect = 0, kRing = 1 };

struct Call {
  int64_t run;           // identifies one execution of a program in this process
  int64_t communicator;  // 0: all ranks are threads of this process
  int32_t group;         // of ranks that reduce together
  int32_t bucket;        // number of the call in the program
  int32_t rank;          // within the group
  int32_t num_ranks;     // of the group
  Algorithm algorithm;
  double scale;  // of a sum of floats; a float32 scale is represented exactly
  Operation operation = Operation::kAllReduce;
  bool as_xla = false;  // sums in the float mode of the caller, a thread of XLA
};

// Runs `call.operation` with the ranks that make the same call. A sum is that of `reduce`, also in
// a reduce-scatter. Returns when the other ranks no longer access this rank's memory.
Status collective(const Call& call, const Bucket& bucket);

// `nth` counts the calls of this bucket from 1.
Status timed_out(const Call& call, uint64_t nth, double waited_s, const std::vector<int>& missing);
Status peer_gone(const Call& call, uint64_t nth, const std::vector<int>& gone);
Status was_aborted(const Call& call, uint64_t nth, const std::string& reason);
Status invalid(const Call& call, uint64_t nth, const std::string& what);

}  // namespace jdp
