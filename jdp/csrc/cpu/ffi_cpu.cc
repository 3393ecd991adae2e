// The XLA custom call of the CPU all-reduce: unpacks buffers and attributes, and calls the library.

#include <optional>
#include <vector>

#include "../common/ffi_types.h"
#include "c_api.h"
#include "call.h"

namespace jdp {
namespace {

// Widening a float to double is exact.
double scale_of(const ffi::AnyBuffer& scale) {
  return scale.element_type() == ffi::F64 ? *static_cast<const double*>(scale.untyped_data())
                                          : *static_cast<const float*>(scale.untyped_data());
}

ffi::Error handle(ffi::RunId run, ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32> group,
                  ffi::AnyBuffer scale, ffi::BufferR1<ffi::F32> token, ffi::RemainingArgs leaves,
                  ffi::ResultBufferR1<ffi::F32> token_out, ffi::RemainingRets results,
                  int32_t num_ranks, int32_t bucket, int32_t algorithm, int64_t communicator) {
  const auto wrong = [&](const char* what) {
    return ffi::Error::InvalidArgument("jdp: bucket " + std::to_string(bucket) + ": " + what);
  };
  if (leaves.size() == 0 || leaves.size() != results.size()) {
    return wrong("there must be at least one leaf, and one result for each leaf");
  }
  if (scale.element_type() != ffi::F32 && scale.element_type() != ffi::F64) {
    return wrong("the scale must be f32 or f64");
  }
  std::vector<Leaf> places;
  places.reserve(leaves.size());
  const ffi::DataType dtype = leaves.get<ffi::AnyBuffer>(0)->element_type();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const ffi::AnyBuffer in = *leaves.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer out = **results.get<ffi::AnyBuffer>(i);
    if (in.element_type() != dtype || out.element_type() != dtype ||
        in.element_count() != out.element_count()) {
      return wrong(
          "all leaves and results must have one dtype, and each result the size of its leaf");
    }
    places.push_back(
        {in.untyped_data(), out.untyped_data(), static_cast<int64_t>(in.element_count())});
  }
  const std::optional<Type> type = type_of(dtype);
  if (!type) return wrong("this dtype is not supported");
  const Call call{run.run_id,
                  communicator,
                  *group.typed_data(),
                  bucket,
                  *rank.typed_data(),
                  num_ranks,
                  static_cast<Algorithm>(algorithm),
                  scale_of(scale)};
  const Status status = all_reduce(call, Bucket(*type, std::move(places)));
  if (status.ok() && token_out->typed_data() != token.typed_data()) {
    *token_out->typed_data() = *token.typed_data();
  }
  return error_of(status);
}

}  // namespace
}  // namespace jdp

extern "C" JDP_EXPORT XLA_FFI_Error* jdp_all_reduce(XLA_FFI_CallFrame* frame);

// The version of the FFI headers that this library was built with. An older runtime must not load
// it.
extern "C" JDP_EXPORT int jdp_ffi_api_version();

int jdp_ffi_api_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdp_all_reduce, jdp::handle,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .RemainingRets()
                                  .Attr<int32_t>("num_ranks")
                                  .Attr<int32_t>("bucket")
                                  .Attr<int32_t>("algorithm")
                                  .Attr<int64_t>("communicator"));
