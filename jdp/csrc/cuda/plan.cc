#include "plan.h"

#include <algorithm>

namespace jdp {
namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

const char* name(Topology topology) {
  switch (topology) {
    case Topology::kPcie:
      return "PCIe";
    case Topology::kNvlink:
      return "NVLink";
    case Topology::kSameDevice:
      return "one device";
  }
  return "?";
}

}  // namespace

// Bytes that a rank sends to reduce S bytes among n ranks:
//
//   one-shot   (n - 1) S
//   two-shot   2 (n - 1) / n S: elements to their owner, and their mean back
//   ring       2 (n - 1) / n S; 3 (n - 1) / n S for 16-bit types, whose partial sums are float32
//
// If every pair of GPUs has NVLink, two-shot sends no more than a ring at any size, uses all links
// of a GPU at once, and waits twice instead of 2 (n - 1) times. So rings are used only on PCIe,
// where the paths of several pairs share one link, and in tests with all ranks on one device.
//
// The size below which one-shot is faster is from vLLM's and XLA's dispatch tables. jdp has no
// measurements of its own yet.
Plan make_plan(int num_ranks, Topology topology) {
  Plan plan = {};
  plan.topology = static_cast<int64_t>(topology);
  plan.layout.num_ranks = num_ranks;
  plan.layout.num_channels = topology == Topology::kPcie ? 8 : 24;
  plan.layout.slot_bytes = topology == Topology::kNvlink ? 0 : 256 * kKiB;  // ring messages
  plan.layout.exchange_bytes = topology == Topology::kNvlink ? 64 * kKiB : 32 * kKiB;
  plan.channel_bytes = 8 * kKiB;
  plan.one_shot_bytes = topology == Topology::kPcie ? 32 * kKiB
                        : num_ranks <= 2            ? kMiB
                        : num_ranks <= 4            ? 512 * kKiB
                                                    : 256 * kKiB;
  switch (topology) {
    case Topology::kPcie:
      plan.two_shot_bytes = 0;
      break;
    case Topology::kNvlink:
      plan.two_shot_bytes = INT64_MAX;
      break;
    case Topology::kSameDevice:
      plan.two_shot_bytes = 16 * kMiB;
      break;
  }
  return plan;
}

Algorithm choose(const Plan& plan, int64_t bytes) {
  if (bytes <= plan.one_shot_bytes) return Algorithm::kOneShot;
  if (bytes <= plan.two_shot_bytes) return Algorithm::kTwoShot;
  return Algorithm::kRing;
}

int num_channels(const Plan& plan, int64_t bytes) {
  const int64_t wanted = (bytes + plan.channel_bytes - 1) / plan.channel_bytes;
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, plan.layout.num_channels));
}

std::string describe(const Plan& plan) {
  const auto kib = [](int64_t bytes) { return std::to_string(bytes / kKiB) + " KiB"; };
  const bool has_ring = plan.two_shot_bytes < INT64_MAX;
  std::string line = std::to_string(plan.layout.num_ranks) + " ranks over " +
                     name(static_cast<Topology>(plan.topology)) + ": one-shot up to " +
                     kib(plan.one_shot_bytes);
  if (!has_ring) {
    line += ", two-shot above";
  } else if (plan.two_shot_bytes > plan.one_shot_bytes) {
    line += ", two-shot up to " + kib(plan.two_shot_bytes) + ", ring above";
  } else {
    line += ", ring above";
  }
  line += "; up to " + std::to_string(plan.layout.num_channels) + " blocks, one for each " +
          kib(plan.channel_bytes);
  if (has_ring) line += "; ring messages of " + kib(plan.layout.slot_bytes);
  return line + "; parts of an exchange of " + kib(plan.layout.exchange_bytes) + "; " +
         kib(staging_bytes(plan.layout)) + " of staging memory";
}

}  // namespace jdp
