// The XLA custom calls of the CPU collectives.

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

// The attribute that differs: the Algorithm of an all-reduce; for the others the dim along which
// each leaf is split, in an all-to-all followed by the one along which arriving slices are joined.
// In a reduce-scatter it is kWhole for a leaf that stays whole.
constexpr int64_t kWhole = -1;
using Dims = ffi::Span<const int64_t>;
template <Operation operation>
using Own = std::conditional_t<operation == Operation::kAllReduce, int32_t, Dims>;

constexpr bool is_cut(Operation operation) { return operation != Operation::kAllReduce; }

// Whether an operation copies the bytes of any dtype.
constexpr bool is_copied(Operation operation) {
  return operation == Operation::kAllGather || operation == Operation::kAllToAll;
}

constexpr size_t num_dims(Operation operation) { return operation == Operation::kAllToAll ? 2 : 1; }

// All that a call needs after XLA's frame is destroyed.
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

// Returns why `out` is not `in` with dim `split` divided by the number of ranks, and dim `joined`
// multiplied by it; "" if it is. A negative dim stays.
const char* why_not_slices(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out, int64_t split,
                           int64_t joined, int64_t num_ranks) {
  const auto dims = in.dimensions(), outs = out.dimensions();
  const int64_t size = static_cast<int64_t>(dims.size());
  if (std::max(split, joined) < 0 || std::max(split, joined) >= size ||
      dims.size() != outs.size()) {
    return "each leaf must have the dim along which it is cut";
  }
  for (int64_t i = 0; i < size; ++i) {
    const int64_t own = i == split ? num_ranks : 1, theirs = i == joined ? num_ranks : 1;
    if (dims[i] % own != 0 || dims[i] / own * theirs != outs[i]) {
      return "each rank must have an equal slice of each leaf";
    }
  }
  return "";
}

// Elements of a slice in one row of the whole, cut along `dim`.
int64_t run_of(const ffi::AnyBuffer& whole, int64_t dim, int64_t num_ranks) {
  int64_t run = whole.dimensions()[dim] / num_ranks;
  for (size_t i = dim + 1; i < whole.dimensions().size(); ++i) run *= whole.dimensions()[i];
  return std::max<int64_t>(run, 1);
}

Leaf leaf_of(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out) {
  return {in.untyped_data(), out.untyped_data(), static_cast<int64_t>(in.element_count())};
}

// As above, for a leaf cut along `dims`. Returns null and sets `why`.
std::optional<Leaf> cut_leaf_of(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out,
                                const int64_t* dims, int64_t num_ranks, Operation operation,
                                const char** why) {
  if (operation == Operation::kReduceScatter && dims[0] == kWhole) {
    const bool is_same = in.element_count() == out.element_count();
    if (!is_same) *why = "the result of a leaf that stays whole must have its size";
    return is_same ? std::optional<Leaf>(leaf_of(in, out)) : std::nullopt;
  }
  const bool is_gathered = operation == Operation::kAllGather;
  const bool is_exchanged = operation == Operation::kAllToAll;
  const auto ins = in.dimensions(), outs = out.dimensions();
  const bool is_in_place = is_gathered && in.untyped_data() == out.untyped_data() &&
                           std::equal(ins.begin(), ins.end(), outs.begin(), outs.end());
  const int64_t joined = is_exchanged ? dims[1] : is_gathered ? dims[0] : -1;
  const int64_t split = is_gathered && !is_in_place ? -1 : dims[0];
  *why = why_not_slices(in, out, split, joined, num_ranks);
  if (**why) return std::nullopt;
  const ffi::AnyBuffer& whole = is_gathered ? out : in;
  const int64_t unit =
      is_copied(operation) ? static_cast<int64_t>(ByteWidth(in.element_type())) : 1;
  return Leaf{in.untyped_data(), out.untyped_data(),
              static_cast<int64_t>(whole.element_count()) * unit,
              run_of(whole, dims[0], num_ranks) * unit,
              is_exchanged ? run_of(out, joined, num_ranks) * unit : 0};
}

template <Operation operation>
ffi::ErrorOr<Task> unpacked(ffi::RunId run, ffi::BufferR0<ffi::S32> rank,
                            ffi::BufferR0<ffi::S32> group, ffi::AnyBuffer scale,
                            ffi::BufferR1<ffi::F32> token, ffi::RemainingArgs& leaves,
                            ffi::ResultBufferR1<ffi::F32> token_out, ffi::RemainingRets& results,
                            int32_t num_ranks, int32_t bucket, int64_t communicator, bool as_xla,
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
    if (own.size() != leaves.size() * num_dims(operation)) {
      return wrong("there must be the same number of dims for each leaf");
    }
  } else {
    algorithm = static_cast<Algorithm>(own);
  }
  const Call call{run.run_id, communicator, *group.typed_data(), bucket,    *rank.typed_data(),
                  num_ranks,  algorithm,    scale_of(scale),     operation, as_xla};
  const ffi::DataType dtype = leaves.get<ffi::AnyBuffer>(0)->element_type();
  const std::optional<Type> type = is_copied(operation) ? Type::kU8 : type_of(dtype);
  if (!type) return wrong("this dtype is not supported");
  std::vector<Leaf> places;
  places.reserve(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    const ffi::AnyBuffer in = *leaves.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer out = **results.get<ffi::AnyBuffer>(i);
    if (in.element_type() != out.element_type() ||
        (!is_copied(operation) && in.element_type() != dtype)) {
      return wrong("all leaves that are summed, and each leaf and its result, must have one dtype");
    }
    if constexpr (is_cut(operation)) {
      const char* why = "";
      const int64_t* dims = own.begin() + i * num_dims(operation);
      const std::optional<Leaf> leaf = cut_leaf_of(in, out, dims, num_ranks, operation, &why);
      if (!leaf) return wrong(why);
      places.push_back(*leaf);
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
                  int32_t num_ranks, int32_t bucket, int64_t communicator, bool as_xla,
                  Own<operation> own) {
  const auto task = unpacked<operation>(run, rank, group, scale, token, leaves, token_out, results,
                                        num_ranks, bucket, communicator, as_xla, own);
  return task.has_error() ? task.error() : task->run();
}

// Blocks a thread of jdp, since XLA's collectives may run at the same time.
template <Operation operation>
ffi::Future start(ffi::RunId run, ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32> group,
                  ffi::AnyBuffer scale, ffi::BufferR1<ffi::F32> token, ffi::RemainingArgs leaves,
                  ffi::ResultBufferR1<ffi::F32> token_out, ffi::RemainingRets results,
                  int32_t num_ranks, int32_t bucket, int64_t communicator, bool as_xla,
                  Own<operation> own) {
  ffi::Promise promise;
  ffi::Future future(promise);
  auto task = unpacked<operation>(run, rank, group, scale, token, leaves, token_out, results,
                                  num_ranks, bucket, communicator, as_xla, own);
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
constexpr auto& all_to_all = handle<Operation::kAllToAll>;
constexpr auto& start_all_reduce = start<Operation::kAllReduce>;
constexpr auto& start_reduce_scatter = start<Operation::kReduceScatter>;
constexpr auto& start_all_gather = start<Operation::kAllGather>;
constexpr auto& start_all_to_all = start<Operation::kAllToAll>;

}  // namespace
}  // namespace jdp

// The version of the FFI headers. An older runtime must not load the library.
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
                                    .Attr<bool>("as_xla")              \
                                    .Attr<type>(own))

JDP_HANDLER(jdp_all_reduce, jdp::all_reduce, int32_t, "algorithm");
JDP_HANDLER(jdp_all_reduce_start, jdp::start_all_reduce, int32_t, "algorithm");
JDP_HANDLER(jdp_reduce_scatter, jdp::reduce_scatter, jdp::Dims, "dims");
JDP_HANDLER(jdp_reduce_scatter_start, jdp::start_reduce_scatter, jdp::Dims, "dims");
JDP_HANDLER(jdp_all_gather, jdp::all_gather, jdp::Dims, "dims");
JDP_HANDLER(jdp_all_gather_start, jdp::start_all_gather, jdp::Dims, "dims");
JDP_HANDLER(jdp_all_to_all, jdp::all_to_all, jdp::Dims, "dims");
JDP_HANDLER(jdp_all_to_all_start, jdp::start_all_to_all, jdp::Dims, "dims");
