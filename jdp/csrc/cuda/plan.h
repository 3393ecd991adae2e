// Chooses the algorithm and the number of blocks for a bucket by topology and size, when a
// communicator is opened. It never depends on timing, so all ranks make the same choice, and
// results are bitwise reproducible.

#pragma once

#include <cstdint>
#include <string>

#include "arguments.h"

namespace jdp {

enum class Topology : int32_t {
  kPcie,        // peers reach each other through the host's bus
  kNvlink,      // every pair of ranks has NVLink or NVSwitch between them
  kSameDevice,  // ranks share one GPU
};

// The same on all ranks; compared byte by byte, so it has no padding.
struct Plan {
  Layout layout;
  int64_t one_shot_bytes;
  int64_t two_shot_bytes;  // else ring
                           // INT64_MAX: no ring
  int64_t channel_bytes;   // bytes for each further block, up to layout.num_channels
  int64_t topology;        // a Topology
};
static_assert(sizeof(Plan) == 56, "a Plan must have no padding, which would be compared too");

Plan make_plan(int num_ranks, Topology topology);

Algorithm choose(const Plan& plan, int64_t bytes);
int num_channels(const Plan& plan, int64_t bytes);

// One human-readable line.
std::string describe(const Plan& plan);

}  // namespace jdp
