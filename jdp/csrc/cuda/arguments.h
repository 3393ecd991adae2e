// The arguments of one rank's kernel, and its report to the host.

#pragma once

#include <cstdint>

#include "../common/element.h"
#include "layout.h"

namespace jdp {

enum class Algorithm : int32_t { kRing, kOneShot, kTwoShot };

inline int64_t bytes_of(Type type) {
  switch (type) {
    case Type::kU8:
      return 1;
    case Type::kBF16:
    case Type::kF16:
    case Type::kU16:
      return 2;
    case Type::kF32:
    case Type::kU32:
      return 4;
    case Type::kF64:
    case Type::kU64:
      return 8;
  }
  return 0;
}

// A leaf. In the reduced vector it begins at a multiple of 16 bytes, so that each 16 bytes of a
// message belong to one leaf. The padding at its end is sent but not read.
struct Segment {
  const void* in;
  void* out;      // may be `in`
  int64_t size;   // elements, at least 1
  int32_t begin;  // in the vector, units of 16 bytes
};

// As many as fit into the 4 KiB of kernel parameters, so that the table needs no device memory, no
// copy and no wait. More leaves take several launches.
constexpr int kMaxSegments = 96;

// In pinned host memory, which the host reads without a CUDA call.
struct Report {
  uint32_t outcome;  // an Outcome, written last
  uint32_t call;     // of this channel since the last reset, from 0
  int32_t bucket;
  int32_t rank;
  int32_t gave_up;      // kAborted: the rank whose abort reached this one, or -1. Else: `rank`
  int32_t peer;         // that `gave_up` waited for; -1: none, the host aborted
  int32_t step;         // successful waits of this call
  uint32_t why;         // an Outcome: why `gave_up` gave up
  int32_t num_vectors;  // of this rank's bucket
  Tag sent;             // kMismatched: the tag that `peer` sent
  uint32_t abort;       // written by the host: end every wait
};

struct Arguments {
  Layout layout;
  Staging staging[kMaxRanks];  // of each rank, as mapped on this device
  Report* report;
  const void* scale;    // float, or double for kF64; on the device
  uint64_t timeout_ns;  // 0: wait forever
  int32_t rank;
  int32_t bucket;
  int32_t num_channels;  // blocks of this launch, at most layout.num_channels
  Algorithm algorithm;
  int32_t num_vectors;  // of 16 bytes
  int32_t num_segments;
  Segment segments[kMaxSegments];
};
static_assert(sizeof(Arguments) <= 4096, "kernel parameters take 4 KiB");

}  // namespace jdp
