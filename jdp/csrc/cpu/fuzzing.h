// What the schedule fuzzer (tests/csrc/cpu/schedule_fuzz.cc) changes when it compiles the library:
// the sizes, and where ranks pause. In the library that users get nothing of it remains.

#pragma once

#include <cstdint>

namespace jdp {

// All sizes are fractions of this one, so that small slots give many rounds, messages and tiles.
#ifdef JDP_FUZZ_SLOT_BYTES
constexpr int64_t kSlotBytes = JDP_FUZZ_SLOT_BYTES;
#else
constexpr int64_t kSlotBytes = 512 * 1024;
#endif

enum class Stage { kPublish, kReduce, kGather, kMessage, kTile };

#ifdef JDP_FUZZ
// Defined by the fuzzer. Called between any two steps that another rank could come between.
void pause_at(Stage stage);
#else
inline void pause_at(Stage) {}
#endif

}  // namespace jdp
