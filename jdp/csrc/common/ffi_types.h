// Conversions between XLA's FFI types and those of the libraries.

#pragma once

#include <optional>

#include "element.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jdp {

inline std::optional<Type> type_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return Type::kF32;
    case ffi::F64:
      return Type::kF64;
    case ffi::BF16:
      return Type::kBF16;
    case ffi::F16:
      return Type::kF16;
    case ffi::S8:
    case ffi::U8:
      return Type::kU8;
    case ffi::S16:
    case ffi::U16:
      return Type::kU16;
    case ffi::S32:
    case ffi::U32:
      return Type::kU32;
    case ffi::S64:
    case ffi::U64:
      return Type::kU64;
    default:
      return std::nullopt;
  }
}

inline ffi::Error error_of(const Status& status) {
  switch (status.code) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message);
    case Code::kFailedPrecondition:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, status.message);
    case Code::kResourceExhausted:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.message);
    case Code::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, status.message);
    case Code::kAborted:
      return ffi::Error(ffi::ErrorCode::kAborted, status.message);
    case Code::kUnavailable:
      return ffi::Error(ffi::ErrorCode::kUnavailable, status.message);
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.message);
}

}  // namespace jdp
