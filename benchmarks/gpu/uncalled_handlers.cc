// Replaces the ring's handlers if jdp has no CUDA library: XLA looks them up when it compiles, and
// programs that are only compiled never call them.
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Uncalled(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error::Internal("compiled only");
}

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdp_ring_start, Uncalled,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdp_ring_done, Uncalled,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());
#pragma GCC visibility pop
