// The rounding mode and the handling of subnormal numbers of this thread.

#pragma once

#ifdef __SSE2__
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace jdp {

// Makes this thread round to nearest and keep subnormal numbers, for as long as the object exists.
// XLA's threads flush them to 0, and a sum must not depend on the thread that computes it.
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
