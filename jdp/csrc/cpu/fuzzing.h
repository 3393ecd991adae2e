// Hooks for the schedule fuzzer (tests/csrc/cpu/schedule_fuzz.cc): it compiles the library with
// other sizes, and with pauses. They compile to nothing in the library that users get.

#pragma once

#include <cstdint>

namespace jdp {

// All sizes derive from this one, so that small slots cause many rounds, messages and tiles.
#ifdef JDP_FUZZ_SLOT_BYTES
constexpr int64_t kSlotBytes = JDP_FUZZ_SLOT_BYTES;
#else
constexpr int64_t kSlotBytes = 512 * 1024;
#endif

enum class Stage { kPublish, kReduce, kGather, kMessage, kTile };

#ifdef JDP_FUZZ
// Defined by the fuzzer. Called between any two steps that another rank's steps could interleave
// with.
void pause_at(Stage stage);
#else
inline void pause_at(Stage) {}
#endif

}  // namespace jdp
