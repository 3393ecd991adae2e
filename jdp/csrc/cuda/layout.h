// Flags and messages in a rank's staging memory, which its peers write.
//
// One channel is one thread block. Peers push: a rank polls and reads its own memory only.

#pragma once

#include <cstdint>

#include "../common/ring_all_reduce.h"

namespace jdp {

constexpr int kMaxRanks = 16;
// Ring messages in flight; a power of two, so that counters may wrap around.
constexpr uint32_t kNumSlots = 4;
// Exchanges alternate between two sets of slots: see one_two_shot.cuh.
constexpr uint32_t kNumSets = 2;

// The state between launches. All counters count messages since the last reset, wrap around, and
// are compared by the sign of their difference.
struct ChannelState {
  uint32_t sent;
  uint32_t received;
  uint32_t exchanged;
  uint32_t call;  // launches
};

// Identifies the bucket and call of a message, beside the counter that announces it; the same on
// all ranks. A message with another tag must not be added.
struct Tag {
  int32_t bucket;
  uint32_t call;  // ChannelState::call
  int32_t num_vectors;
};

JDP_HOST_DEVICE inline bool operator==(const Tag& one, const Tag& other) {
  return one.bucket == other.bucket && one.call == other.call &&
         one.num_vectors == other.num_vectors;
}

// One cache line for each writer.
struct alignas(128) ChannelFlags {
  alignas(128) uint32_t head;    // written by the previous rank: ring messages it has sent
  Tag tags[kNumSlots];           // written by the previous rank: the tag of each slot's message
  alignas(128) uint32_t credit;  // written by the next rank: ring messages it has received
  alignas(128) uint32_t exchanged[kMaxRanks];  // [r], written by rank r: exchanges it has sent
  Tag exchange_tags[kNumSets]
                   [kMaxRanks];     // [s][r], written by rank r: the tag of its part in set s
  alignas(128) ChannelState state;  // this rank's own
};

struct alignas(128) RankFlags {
  uint32_t abort;                          // 0, or an abort_word
  alignas(128) uint32_t reported;          // this rank's own: the Report holds a failure
  alignas(128) uint32_t probe[kMaxRanks];  // [r], written by rank r in probe_write
};

enum class Outcome : uint32_t {
  kNone = 0,
  kLate = 1,        // a rank did not answer in time
  kAborted = 2,     // another rank gave up, or the host aborted
  kMismatched = 3,  // a rank sent a message of another bucket or call
};

// Packs the rank that gave up, the rank that it waited for, and the reason.
JDP_HOST_DEVICE inline uint32_t abort_word(int rank, int peer, Outcome why) {
  return static_cast<uint32_t>(1 + rank) | static_cast<uint32_t>(1 + peer) << 8 |
         static_cast<uint32_t>(why) << 16;
}
JDP_HOST_DEVICE inline int aborting_rank(uint32_t word) { return static_cast<int>(word & 255) - 1; }
JDP_HOST_DEVICE inline int awaited_rank(uint32_t word) {
  return static_cast<int>(word >> 8 & 255) - 1;
}
JDP_HOST_DEVICE inline uint32_t abort_outcome(uint32_t word) { return word >> 16; }

// The same on all ranks of a reduction.
struct Layout {
  int32_t num_ranks;
  int32_t num_channels;
  int64_t slot_bytes;      // of one ring message, a multiple of 32; 0: rings are not used
  int64_t exchange_bytes;  // of one rank's part in an exchange, a multiple of 16
};

JDP_HOST_DEVICE inline int64_t channel_bytes(const Layout& layout) {
  return kNumSlots * layout.slot_bytes + kNumSets * layout.num_ranks * layout.exchange_bytes;
}

JDP_HOST_DEVICE inline int64_t flags_bytes(const Layout& layout) {
  return sizeof(RankFlags) + layout.num_channels * sizeof(ChannelFlags);
}

JDP_HOST_DEVICE inline int64_t staging_bytes(const Layout& layout) {
  return flags_bytes(layout) + layout.num_channels * channel_bytes(layout);
}

// One rank's staging memory, as mapped on the device that uses it.
struct Staging {
  char* base;

  JDP_HOST_DEVICE RankFlags* rank() const { return reinterpret_cast<RankFlags*>(base); }

  JDP_HOST_DEVICE ChannelFlags* channel(int channel) const {
    return reinterpret_cast<ChannelFlags*>(base + sizeof(RankFlags)) + channel;
  }

  JDP_HOST_DEVICE char* slot(const Layout& layout, int channel, uint32_t message) const {
    return messages(layout, channel) + (message % kNumSlots) * layout.slot_bytes;
  }

  JDP_HOST_DEVICE char* exchange_slot(const Layout& layout, int channel, uint32_t exchange,
                                      int source) const {
    const int64_t slot = (exchange % kNumSets) * layout.num_ranks + source;
    return messages(layout, channel) + kNumSlots * layout.slot_bytes + slot * layout.exchange_bytes;
  }

 private:
  JDP_HOST_DEVICE char* messages(const Layout& layout, int channel) const {
    return base + flags_bytes(layout) + channel * channel_bytes(layout);
  }
};

}  // namespace jdp
