// How a call ended.

#pragma once

#include <string>

namespace jdp {

enum class Code {
  kOk,
  kInvalidArgument,
  kFailedPrecondition,
  kResourceExhausted,
  kDeadlineExceeded,
  kAborted,
  kUnavailable,  // the hardware or the driver cannot do it
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

}  // namespace jdp

#define JDP_RETURN_IF_ERROR(expression)                                      \
  do {                                                                       \
    if (::jdp::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)
