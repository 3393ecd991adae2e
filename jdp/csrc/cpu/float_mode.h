// How this thread rounds, and what it does with subnormal numbers.

#pragma once

#ifdef __SSE2__
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace jdp {

// While it lives this thread rounds to nearest and keeps subnormal numbers. XLA's threads take them
// for 0 and make 0 of them; a sum must not depend on which thread adds it up.
class DefaultFloatMode {
 public:
  DefaultFloatMode(const DefaultFloatMode&) = delete;
#ifdef __SSE2__
  DefaultFloatMode() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#else
  DefaultFloatMode() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
#endif
};

}  // namespace jdp
