// A runtime of one GPU that computes nothing: it records which work may run beside which, what is
// allocated, and fails one call if it is told to.

#pragma once

#include <bitset>
#include <set>
#include <string>
#include <vector>

#include "cuda/kernels.h"

// The memory that work reads or writes.
struct Access {
  const char* begin;
  const char* end;
  bool writes;
};

constexpr int kMaxWork = 8192;
using WorkSet = std::bitset<kMaxWork>;

struct Work {
  const char* name;
  std::vector<Access> accesses;
  WorkSet before;  // work that has ended when it begins
};

struct Stream {
  WorkSet before;  // work that has ended when later work of this stream begins
};

struct Event {
  WorkSet before;
};

struct Runtime {
  std::vector<Work> work;
  WorkSet waited;        // work that the host has waited for
  std::set<void*> live;  // memory, streams and events
  int num_calls = 0;
  int failing = 0;  // number of the call that fails, from 1; 0: none
  std::string failed;

  // Returns whether a call fails.
  bool fails(const char* name);
  void enqueue(Stream* stream, const char* name, std::vector<Access> accesses);
  // Returns two pieces of work that may run at once and do not agree about memory; "" if none do.
  std::string race() const;
};

extern Runtime runtime;
