// How an all-reduce ended, told without XLA's types.

#pragma once

#include <string>

namespace jdp {

enum class Code : int { kOk, kInvalidArgument, kDeadlineExceeded, kAborted };

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

}  // namespace jdp
