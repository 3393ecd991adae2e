#include "process.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

namespace jdp {
namespace {

enum class Found { kYes, kNo, kUnknown };

struct Stat {
  Found found;
  char state;
  long num_threads;
  unsigned long long started;  // clock ticks since the host booted
};

Stat stat_of(int pid) {
  Stat it{Found::kUnknown, 0, 0, 0};
  const int fd = open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  char text[1024];
  const ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
  const int error = errno;
  if (fd >= 0) close(fd);
  if (size < 0) {
    if (error == ENOENT || error == ESRCH) it.found = Found::kNo;
    return it;
  }
  text[size] = 0;
  // The program's name is in parentheses and may contain any character, so search for the last one.
  const char* rest = std::strrchr(text, ')');
  if (rest && std::sscanf(rest,
                          ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d "
                          "%ld %*d %llu",
                          &it.state, &it.num_threads, &it.started) == 3) {
    it.found = Found::kYes;
  }
  return it;
}

Process process_of(int pid, const Stat& stat) {
  return static_cast<Process>(pid) << 40 | (stat.started & ((Process{1} << 40) - 1));
}

}  // namespace

Process this_process() {
  const int pid = getpid();
  const Stat stat = stat_of(pid);
  return stat.found == Found::kYes ? process_of(pid, stat) : 0;
}

bool has_ended(Process process) {
  const int pid = pid_of(process);
  const Stat stat = stat_of(pid);
  if (stat.found != Found::kYes) return stat.found == Found::kNo;
  // The first thread of a process may end before the others.
  const bool is_dead = (stat.state == 'Z' && stat.num_threads <= 1) || stat.state == 'X';
  return is_dead || process_of(pid, stat) != process;
}

}  // namespace jdp
