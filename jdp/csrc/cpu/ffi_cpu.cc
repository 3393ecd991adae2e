// The XLA custom calls of the CPU collectives: unpack buffers and attributes, and call the library.

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "../common/ffi_types.h"
#include "c_api.h"
#include "call.h"
#include "own_threads.h"

namespace jdp {
namespace {

// The attribute that differs between the operations: the Algorithm of an all-reduce; for the others
// the dim along which each leaf is split.
using Dims = ffi::Span<const int64_t>;
template <Operation operation>
using Own = std::conditional_t<operation == Operation::kAllReduce, int32_t, Dims>;

constexpr bool is_cut(Operation operation) { return operation != Operation::kAllReduce; }

// A call with everything that it needs after XLA's frame is destroyed.
struct Task {
  Call call;
  Bucket bucket;
  const float* token;
  float* token_out;

  ffi::Error run() const {
    const Status status = collective(call, bucket);
    if (status.ok() && token_out != token) *token_out = *token;
    return error_of(status);
  }
};

// Widening a float to double is exact.
double scale_of(const ffi::AnyBuffer& scale) {
  return scale.element_type() == ffi::F64 ? *static_cast<const double*>(scale.untyped_data())
                                          : *static_cast<const float*>(scale.untyped_data());
}

// Returns why `slice` is not a slice of `whole` along `dim`; "" if it is one.
const char* why_not_slice(const ffi::AnyBuffer& whole, const ffi::AnyBuffer& slice, int64_t dim,
                          int64_t num_ranks) {
  const auto dims = whole.dimensions(), own = slice.dimensions();
  if (dim < 0 || dim >= static_cast<int64_t>(own.size()) || dims.size() != own.size()) {
    return "each leaf must have the dim along which it is cut";
  }
  for (size_t i = 0; i < own.size(); ++i) {
    if (dims[i] != own[i] * (static_cast<int64_t>(i) == dim ? num_ranks : 1)) {
      return "each rank must have an equal slice of each leaf";
    }
  }
  return "";
}

// Elements of a slice in one row of the whole; 1 if it has none.
int64_t run_of(const ffi::AnyBuffer& slice, int64_t dim) {
  int64_t run = 1;
  for (size_t i = dim; i < slice.dimensions().size(); ++i) run *= slice.dimensions()[i];
  return std::max<int64_t>(run, 1);
}

Leaf leaf_of(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out) {
  return {in.untyped_data(), out.untyped_data(), static_cast<int64_t>(in.element_count())};
}

// As above, for a leaf that is split along `dim`. An all-gather copies the bytes of any dtype.
Leaf cut_leaf_of(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out, int64_t dim,
                 Operation operation) {
  const bool is_gathered = operation == Operation::kAllGather;
  const ffi::AnyBuffer &whole = is_gathered ? out : in, &slice = is_gathered ? in : out;
  const int64_t unit = is_gathered ? static_cast<int64_t>(ByteWidth(in.element_type())) : 1;
  return {in.untyped_data(), out.untyped_data(), static_cast<int64_t>(whole.element_count()) * unit,
          run_of(slice, dim) * unit};
}

template <Operation operation>
ffi::ErrorOr<Task> unpacked(ffi::RunId run, ffi::BufferR0<ffi::S32> rank,
                            ffi::BufferR0<ffi::S32> group, ffi::AnyBuffer scale,
                            ffi::BufferR1<ffi::F32> token, ffi::RemainingArgs& leaves,
                            ffi::ResultBufferR1<ffi::F32> token_out, ffi::RemainingRets& results,
                            int32_t num_ranks, int32_t bucket, int64_t communicator,
                            Own<operation> own) {
  const auto wrong = [&](const char* what) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("jdp: bucket " + std::to_string(bucket) + ": " + what));
  };
  if (leaves.size() == 0 || leaves.size() != results.size()) {
    return wrong("there must be at least one leaf, and one result for each leaf");
  }
  if (scale.element_type() != ffi::F32 && scale.element_type() != ffi::F64) {
    return wrong("the scale must be f32 or f64");
  }
  Algorithm algorithm = Algorithm::kDirect;
  if constexpr (is_cut(operation)) {
    if (own.size() != leaves.size()) return wrong("there must be one dim for each leaf");
  } else {
    algorithm = static_cast<Algorithm>(own);
  }
  const Call call{run.run_id, communicator, *group.typed_data(), bucket,   *rank.typed_data(),
                  num_ranks,  algorithm,    scale_of(scale),     operation};
  const ffi::DataType dtype = leaves.get<ffi::AnyBuffer>(0)->element_type();
  const std::optional<Type> type = operation == Operation::kAllGather ? Type::kU8 : type_of(dtype);
  if (!type) return wrong("this dtype is not supported");
  std::vector<Leaf> places;
  places.reserve(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    const ffi::AnyBuffer in = *leaves.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer out = **results.get<ffi::AnyBuffer>(i);
    if (in.element_type() != out.element_type() ||
        (operation != Operation::kAllGather && in.element_type() != dtype)) {
      return wrong("all leaves that are summed, and each leaf and its result, must have one dtype");
    }
    if constexpr (is_cut(operation)) {
      const bool is_gathered = operation == Operation::kAllGather;
      const char* why =
          why_not_slice(is_gathered ? out : in, is_gathered ? in : out, own[i], num_ranks);
      if (*why) return wrong(why);
      places.push_back(cut_leaf_of(in, out, own[i], operation));
    } else {
      if (in.element_count() != out.element_count()) {
        return wrong("each result must have the size of its leaf");
      }
      places.push_back(leaf_of(in, out));
    }
  }
  return Task{call, Bucket(*type, std::move(places)), token.typed_data(), token_out->typed_data()};
}

// Blocks the thread of XLA that calls it.
template <Operation operation>
ffi::Error handle(ffi::RunId run, ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32> group,
                  ffi::AnyBuffer scale, ffi::BufferR1<ffi::F32> token, ffi::RemainingArgs leaves,
                  ffi::ResultBufferR1<ffi::F32> token_out, ffi::RemainingRets results,
                  int32_t num_ranks, int32_t bucket, int64_t communicator, Own<operation> own) {
  const auto task = unpacked<operation>(run, rank, group, scale, token, leaves, token_out, results,
                                        num_ranks, bucket, communicator, own);
  return task.has_error() ? task.error() : task->run();
}

// Blocks a thread of jdp, for programs in which XLA's collectives may run at the same time.
template <Operation operation>
ffi::Future start(ffi::RunId run, ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32> group,
                  ffi::AnyBuffer scale, ffi::BufferR1<ffi::F32> token, ffi::RemainingArgs leaves,
                  ffi::ResultBufferR1<ffi::F32> token_out, ffi::RemainingRets results,
                  int32_t num_ranks, int32_t bucket, int64_t communicator, Own<operation> own) {
  ffi::Promise promise;
  ffi::Future future(promise);
  auto task = unpacked<operation>(run, rank, group, scale, token, leaves, token_out, results,
                                  num_ranks, bucket, communicator, own);
  if (task.has_error()) {
    promise.SetError(task.error());
    return future;
  }
  run_on_own_thread([promise, task = std::move(*task)]() mutable {
    const ffi::Error error = task.run();
    error.success() ? promise.SetAvailable() : promise.SetError(error);
  });
  return future;
}

constexpr auto& all_reduce = handle<Operation::kAllReduce>;
constexpr auto& reduce_scatter = handle<Operation::kReduceScatter>;
constexpr auto& all_gather = handle<Operation::kAllGather>;
constexpr auto& start_all_reduce = start<Operation::kAllReduce>;
constexpr auto& start_reduce_scatter = start<Operation::kReduceScatter>;
constexpr auto& start_all_gather = start<Operation::kAllGather>;

}  // namespace
}  // namespace jdp

// The version of the FFI headers that this library was built with. An older runtime must not load
// it.
extern "C" JDP_EXPORT int jdp_ffi_api_version();

int jdp_ffi_api_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

#define JDP_HANDLER(name, function, type, own)                         \
  extern "C" JDP_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                        \
                                ffi::Ffi::Bind()                       \
                                    .Ctx<ffi::RunId>()                 \
                                    .Arg<ffi::BufferR0<ffi::S32>>()    \
                                    .Arg<ffi::BufferR0<ffi::S32>>()    \
                                    .Arg<ffi::AnyBuffer>()             \
                                    .Arg<ffi::BufferR1<ffi::F32>>()    \
                                    .RemainingArgs()                   \
                                    .Ret<ffi::BufferR1<ffi::F32>>()    \
                                    .RemainingRets()                   \
                                    .Attr<int32_t>("num_ranks")        \
                                    .Attr<int32_t>("bucket")           \
                                    .Attr<int64_t>("communicator")     \
                                    .Attr<type>(own))

JDP_HANDLER(jdp_all_reduce, jdp::all_reduce, int32_t, "algorithm");
JDP_HANDLER(jdp_all_reduce_start, jdp::start_all_reduce, int32_t, "algorithm");
JDP_HANDLER(jdp_reduce_scatter, jdp::reduce_scatter, jdp::Dims, "dims");
JDP_HANDLER(jdp_reduce_scatter_start, jdp::start_reduce_scatter, jdp::Dims, "dims");
JDP_HANDLER(jdp_all_gather, jdp::all_gather, jdp::Dims, "dims");
JDP_HANDLER(jdp_all_gather_start, jdp::start_all_gather, jdp::Dims, "dims");
