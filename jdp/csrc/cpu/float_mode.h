// The rounding mode and the handling of subnormal numbers of a thread.

#pragma once

#ifdef __SSE2__
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace jdp {

#ifdef __SSE2__
using FloatMode = unsigned;
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
constexpr FloatMode kDefaultFloatMode = 0x1f80;
#else
using FloatMode = std::fenv_t;
inline FloatMode float_mode() {
  std::fenv_t mode;
  std::fegetenv(&mode);
  return mode;
}
inline void set_float_mode(const FloatMode& mode) { std::fesetenv(&mode); }
#endif

// Makes this thread round to nearest and keep subnormal numbers while the object exists. XLA's
// threads flush them, and a sum must not depend on the thread that computes it.
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
#ifdef __SSE2__
    set_float_mode(kDefaultFloatMode);
#else
    std::fesetenv(FE_DFL_ENV);
#endif
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  ~DefaultFloatMode() { set_float_mode(before_); }

 private:
  const FloatMode before_ = float_mode();
};

}  // namespace jdp
