// The XLA custom calls of the CUDA all-reduce.
//
// No handler is marked as compatible with command buffers: inside a CUDA graph the ring could not
// run beside the step, and would be an unjoined fork.

#include <string>
#include <vector>

#include "../common/ffi_types.h"
#include "c_api.h"
#include "registry.h"

namespace jdp {
namespace {

Status find_for(int64_t key, int32_t ordinal, int32_t num_ranks, int32_t bucket,
                std::shared_ptr<Communicator>* communicator) {
  *communicator = find(key, ordinal);
  const std::string here = "jdp: bucket " + std::to_string(bucket) + ": communicator " +
                           std::to_string(key) + " on device " + std::to_string(ordinal);
  if (!*communicator) {
    return {Code::kFailedPrecondition, here + " was not opened in this process"};
  }
  const int there = (*communicator)->plan().layout.num_ranks;
  if (there == num_ranks) return {};
  return {Code::kFailedPrecondition, here + " has " + std::to_string(there) +
                                         " ranks, but the program has " +
                                         std::to_string(num_ranks)};
}

// XLA calls this before the first kernel of every run, so that failures occur while no ring waits.
ffi::Error initialize(int32_t ordinal, ffi::RemainingArgs, ffi::RemainingRets, int32_t bucket,
                      int32_t num_ranks, int64_t key) {
  std::shared_ptr<Communicator> communicator;
  Status status = find_for(key, ordinal, num_ranks, bucket, &communicator);
  if (status.ok()) status = communicator->load();
  if (!status.ok() && communicator) communicator->give_up(status);
  return error_of(status);
}

ffi::Error start(cudaStream_t stream, int32_t ordinal, ffi::RunId run, ffi::AnyBuffer scale,
                 ffi::RemainingArgs args, ffi::ResultBufferR1<ffi::F32>, int32_t bucket,
                 int32_t num_ranks, int64_t key) {
  const auto wrong = [&](const char* what) {
    return ffi::Error::InvalidArgument("jdp: bucket " + std::to_string(bucket) + ": " + what);
  };
  if (args.size() == 0) return wrong("there must be at least one leaf");
  const ffi::DataType dtype = args.get<ffi::AnyBuffer>(0)->element_type();
  const std::optional<Type> type = type_of(dtype);
  if (!type) return wrong("this type of elements is not supported");
  if (scale.element_type() != (dtype == ffi::F64 ? ffi::F64 : ffi::F32)) {
    return wrong("the scale must be f64 for f64 leaves, and f32 for all others");
  }
  std::vector<Leaf> leaves;
  leaves.reserve(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    const ffi::AnyBuffer leaf = *args.get<ffi::AnyBuffer>(i);
    if (leaf.element_type() != dtype) return wrong("all leaves must have one type");
    leaves.push_back({leaf.untyped_data(), static_cast<int64_t>(leaf.element_count())});
  }
  std::shared_ptr<Communicator> communicator;
  Status status = find_for(key, ordinal, num_ranks, bucket, &communicator);
  // The token's bytes are never read.
  if (status.ok())
    status = communicator->start(run.run_id, bucket, *type, leaves, scale.untyped_data(), stream);
  return error_of(status);
}

ffi::Error done(cudaStream_t stream, int32_t ordinal, ffi::BufferR1<ffi::F32>,
                ffi::BufferR1<ffi::F32>, ffi::RemainingArgs args, ffi::ResultBufferR1<ffi::F32>,
                ffi::RemainingRets results, int32_t bucket, int32_t num_ranks, int64_t key) {
  const auto wrong = [&](const char* what) {
    return ffi::Error::InvalidArgument("jdp: bucket " + std::to_string(bucket) + ": " + what);
  };
  if (args.size() == 0) return wrong("there must be at least one leaf");
  if (args.size() != results.size()) return wrong("there must be as many results as leaves");
  const ffi::DataType dtype = args.get<ffi::AnyBuffer>(0)->element_type();
  const std::optional<Type> type = type_of(dtype);
  if (!type) return wrong("this type of elements is not supported");
  std::vector<Leaf> from;
  std::vector<Leaf> to;
  for (size_t i = 0; i < args.size(); ++i) {
    const ffi::AnyBuffer in = *args.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer out = **results.get<ffi::AnyBuffer>(i);
    if (in.element_type() != dtype || out.element_type() != dtype) {
      return wrong("all leaves and results must have one type");
    }
    from.push_back({in.untyped_data(), static_cast<int64_t>(in.element_count())});
    to.push_back({out.untyped_data(), static_cast<int64_t>(out.element_count())});
  }
  std::shared_ptr<Communicator> communicator;
  Status status = find_for(key, ordinal, num_ranks, bucket, &communicator);
  if (status.ok()) status = communicator->finish(bucket, *type, from, to, stream);
  return error_of(status);
}

}  // namespace
}  // namespace jdp

int jdp_ffi_api_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

extern "C" JDP_EXPORT XLA_FFI_Error* jdp_ring_initialize(XLA_FFI_CallFrame* frame);
extern "C" JDP_EXPORT XLA_FFI_Error* jdp_ring_start(XLA_FFI_CallFrame* frame);
extern "C" JDP_EXPORT XLA_FFI_Error* jdp_ring_done(XLA_FFI_CallFrame* frame);

// Both start and done use it.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdp_ring_initialize, jdp::initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("bucket")
                                  .Attr<int32_t>("num_ranks")
                                  .Attr<int64_t>("communicator"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdp_ring_start, jdp::start,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .Attr<int32_t>("bucket")
                                  .Attr<int32_t>("num_ranks")
                                  .Attr<int64_t>("communicator"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdp_ring_done, jdp::done,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .RemainingRets()
                                  .Attr<int32_t>("bucket")
                                  .Attr<int32_t>("num_ranks")
                                  .Attr<int64_t>("communicator"));
