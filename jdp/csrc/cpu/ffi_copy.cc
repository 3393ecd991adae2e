// The XLA custom call that copies arrays to memory outside of XLA.

#include "../common/ffi_types.h"
#include "c_api.h"
#include "copy_out.h"

namespace jdp {
namespace {

// The addresses are operands, so that no program holds them. The call waits for nothing.
ffi::Error copy_arrays(ffi::BufferR1<ffi::U32> words, ffi::RemainingArgs arrays,
                       ffi::ResultBufferR1<ffi::U8> done) {
  std::vector<Place> places;
  const std::string wrong = read_places(words.untyped_data(), words.element_count() / 2, &places);
  if (!wrong.empty()) return ffi::Error::InvalidArgument("jdp: " + wrong);
  if (places.size() != arrays.size()) {
    return ffi::Error::InvalidArgument("jdp: " + std::to_string(places.size()) + " places for " +
                                       std::to_string(arrays.size()) + " arrays");
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const ffi::AnyBuffer array = *arrays.get<ffi::AnyBuffer>(i);
    const int64_t size = static_cast<int64_t>(array.size_bytes());
    const int64_t first = places[i].first, num_bytes = places[i].num_bytes();
    if (first < 0 || num_bytes < 0 || first > size || num_bytes > size - first) {
      return ffi::Error::InvalidArgument("jdp: " + std::to_string(num_bytes) + " bytes from byte " +
                                         std::to_string(first) + " of an array of " +
                                         std::to_string(size));
    }
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const ffi::AnyBuffer array = *arrays.get<ffi::AnyBuffer>(i);
    copy_out(static_cast<const char*>(array.untyped_data()), places[i]);
  }
  *done->typed_data() = 1;
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jdp

extern "C" JDP_EXPORT XLA_FFI_Error* jdp_copy_out(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jdp_copy_out, jdp::copy_arrays,
    ffi::Ffi::Bind().Arg<ffi::BufferR1<ffi::U32>>().RemainingArgs().Ret<ffi::BufferR1<ffi::U8>>());
