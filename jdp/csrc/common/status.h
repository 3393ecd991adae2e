// The result of a call: a code and a message.

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
  kUnavailable,  // not supported by the hardware or the driver
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
