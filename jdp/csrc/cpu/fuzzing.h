// Hooks for tests/csrc/cpu/schedule_fuzz.cc, which compiles the library with other sizes and with
// pauses. They compile to nothing otherwise.

#pragma once

#include <cstdint>

namespace jdp {

// All sizes derive from it: small slots cause many rounds, messages and tiles.
#ifdef JDP_FUZZ_SLOT_BYTES
constexpr int64_t kSlotBytes = JDP_FUZZ_SLOT_BYTES;
#else
constexpr int64_t kSlotBytes = 512 * 1024;
#endif

enum class Stage { kPublish, kReduce, kGather, kMessage, kTile };

#ifdef JDP_FUZZ
// Called between any two steps that another rank's steps could interleave with.
void pause_at(Stage stage);
#else
inline void pause_at(Stage) {}
#endif

}  // namespace jdp
