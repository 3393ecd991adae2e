#include "plan.h"

#include <algorithm>
#include <cstdio>

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

// Limits from published measurements of others on NVLink (vLLM's and XLA's dispatch tables); none
// of our own yet.
Plan make_plan(int num_ranks, Topology topology) {
  Plan plan = {};
  plan.topology = static_cast<int64_t>(topology);
  plan.layout.num_ranks = num_ranks;
  plan.layout.num_channels = topology == Topology::kPcie ? 8 : 24;
  plan.layout.slot_bytes = 256 * kKiB;
  plan.layout.exchange_bytes = 32 * kKiB;
  plan.channel_bytes = 8 * kKiB;
  plan.one_shot_bytes = topology == Topology::kPcie ? 32 * kKiB
                        : num_ranks <= 2            ? kMiB
                        : num_ranks <= 4            ? 512 * kKiB
                                                    : 256 * kKiB;
  // On PCIe the paths of several pairs share one link: only neighbours talk.
  plan.two_shot_bytes = topology == Topology::kPcie ? 0 : 16 * kMiB;
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
  char line[320];
  const auto kib = [](int64_t bytes) { return static_cast<long long>(bytes / kKiB); };
  snprintf(line, sizeof line,
           "%d ranks over %s: one-shot up to %lld KiB, two-shot up to %lld KiB, ring above; up to "
           "%d blocks, one for each %lld KiB; ring messages of %lld KiB, parts of an "
           "exchange of %lld KiB; %lld KiB of staging memory",
           plan.layout.num_ranks, name(static_cast<Topology>(plan.topology)),
           kib(plan.one_shot_bytes), kib(plan.two_shot_bytes), plan.layout.num_channels,
           kib(plan.channel_bytes), kib(plan.layout.slot_bytes), kib(plan.layout.exchange_bytes),
           kib(staging_bytes(plan.layout)));
  return line;
}

}  // namespace jdp
