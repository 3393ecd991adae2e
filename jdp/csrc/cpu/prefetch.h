// Hints for the CPU's caches.

#pragma once

#include <cstdint>

namespace jdp {

// Loads the cache lines of the `size` bytes after `written`, which will be written next, while the
// CPU computes what is written there. A store to memory that is not in a cache takes longer. The
// bytes need not exist: a prefetch cannot fail.
inline void prefetch_to_write(const void* written, int64_t size) {
  constexpr uintptr_t kLineBytes = 64;
  const auto first = reinterpret_cast<uintptr_t>(written);
  for (uintptr_t i = 0; i < static_cast<uintptr_t>(size); i += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + i), 1);
  }
}

}  // namespace jdp
